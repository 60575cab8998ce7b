"""Products with integer codes in integers: as close to double precision as in floats, whatever the numbers are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.electives.quantization.packing import pack_planes
from tests.contract import DEVICE
from tests.x2.quantized import made_up

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.electives.quantization.kernels import integer_gemv as module
from folovllm.electives.quantization.kernels.integer_gemv import can_handle, integer_gemv
from folovllm.electives.quantization.kernels.quant_gemv import quant_gemv
from folovllm.electives.quantization.weight import QuantizedWeight

DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8}  # of a result


def assert_close(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """But for its own rounding, an output is off by 2^-21 of the largest input for each weight, and the rounding of sums."""
    x = x.double()
    exact, magnitudes = x @ weight.T, x.abs() @ weight.abs().T
    inputs = 2**-21 * x.abs().amax(1, keepdim=True) * weight.abs().sum(1)
    allowed = ROUNDING[actual.dtype] * exact.abs() + inputs + 2**-21 * magnitudes + 1e-7
    fits = exact.abs() < torch.finfo(actual.dtype).max
    assert ((actual.double().cpu() - exact).abs() <= allowed)[fits].all()


SHAPES: list[tuple[str, int, int, str]] = [
    ("int4", 256, 128, "none"), ("int4", 640, 128, "codes"), ("int4", 1536, 256, "none"), ("int4", 384, 384, "codes"),
    ("int8", 144, 144, "none"), ("int8", 1072, 1072, "none"), ("int8", 320, 64, "none"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "width", "group", "zeros"), SHAPES)
def test_every_output_is_close(dtype: torch.dtype, kind: str, width: int, group: int, zeros: str) -> None:
    """One number is 10,000 times as large as the others, and in one row its weight is zero."""
    given_, weight = made_up(kind, 5, width, (1, group), zeros)
    x = torch.randn(1, width, generator=torch.Generator().manual_seed(1)) / 8
    x[:, width // 3] = 1250
    x = x.to(dtype)
    assert_close(integer_gemv(x.to(DEVICE), given_), x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "group"), [("int4", 128), ("int8", 512)])
def test_with_all_that_comes_before_and_after(dtype: torch.dtype, kind: str, group: int) -> None:
    given_, weight = made_up(kind, 22, 512, (1, group))
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(1, 512, generator=generator).to(dtype), torch.randn(1, 22, generator=generator).to(dtype)
    columns = torch.rand(512, generator=generator).to(dtype)
    normed = F.rms_norm(x.double(), (512,), eps=1e-5) * columns.double() @ weight.T
    y = integer_gemv(x.to(DEVICE), given_, 1e-5, residual=residual.to(DEVICE), columns=columns.to(DEVICE))
    limit = 16 * ROUNDING[dtype]
    assert (y.double().cpu() - normed - residual.double()).abs().max() <= limit * normed.abs().max()
    gate, up = normed.chunk(2, 1)
    y = integer_gemv(x.to(DEVICE), given_, 1e-5, gated=True, columns=columns.to(DEVICE))
    assert (y.double().cpu() - F.silu(gate) * up).abs().max() <= limit * gate.abs().max() * up.abs().max()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("kind", "group"), [("int4", 128), ("int8", 256)])
def test_what_is_no_number_stays_none(kind: str, group: int, number: float) -> None:
    """The outputs are not finite then."""
    given_, _ = made_up(kind, 5, 256, (1, group))
    x = torch.randn(1, 256).to(DEVICE, torch.float16)
    x[0, 77] = number
    y = integer_gemv(x, given_)
    assert not y.isfinite().any()


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(1, 7), st.integers(-18, 12), st.integers(0, 2**31))
def test_any_size(shape: tuple, rows: int, exponent: int, seed: int) -> None:
    """Numbers of any size, some of them zero; a share may be all zeros."""
    kind, width, group, zeros = shape
    given_, weight = made_up(kind, rows, width, (1, group), zeros)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, width, generator=generator) * 2.0**exponent / 64
    x[torch.rand(x.shape, generator=generator) < 0.3] = 0
    x[:, : width // 2] *= seed % 2
    x = x.half()
    assert_close(integer_gemv(x.to(DEVICE), given_), x, weight)


@pytest.mark.parametrize(
    ("kind", "width", "group", "zeros"),
    [("int4", 256, 128, "codes"), ("int8", 192, 192, "none"), ("int8", 320, 64, "none")],
)
def test_programs_of_several_groups(
    monkeypatch: pytest.MonkeyPatch, kind: str, width: int, group: int, zeros: str
) -> None:
    """As of large products. Of the last program's groups one is in part past the last row, and one wholly."""
    rows, tile = 38, module.kernel_config(38, width, kind, 1)
    monkeypatch.setattr(module, "kernel_config", lambda *size: tile | {"TIMES": 2})
    given_, weight = made_up(kind, rows, width, (1, group), zeros)
    generator = torch.Generator().manual_seed(2)
    x, residual = torch.randn(1, width, generator=generator).half(), torch.randn(1, rows, generator=generator).half()
    assert_close(integer_gemv(x.to(DEVICE), given_), x, weight)
    y, exact = integer_gemv(x.to(DEVICE), given_, residual=residual.to(DEVICE)), x.double() @ weight.T
    assert (y.double().cpu() - exact - residual.double()).abs().max() <= 2**-10 * (exact.abs().max() + 4)
    y, (gate, up) = integer_gemv(x.to(DEVICE), given_, gated=True), exact.chunk(2, 1)
    assert (y.double().cpu() - F.silu(gate) * up).abs().max() <= 2**-7 * gate.abs().max() * up.abs().max()


@pytest.mark.parametrize("num_sms", [1, 46, 132])
@pytest.mark.parametrize(("kind", "width"), [("int4", 128), ("int4", 6144), ("int8", 48), ("int8", 10240)])
def test_as_many_programs_as_a_card_has_room_for(kind: str, width: int, num_sms: int) -> None:
    """At once, unless each has the most groups that it may have."""
    for lines in (1, 4096, 19456, 151936):
        tile = module.kernel_config(lines, width, kind, num_sms)
        room = num_sms * (65536 // (32 * tile["SPLITS"] * tile["maxnreg"]))
        programs = -(-lines // (16 // module.PARTS.value * tile["TIMES"]))
        assert 0 < programs <= room or tile["TIMES"] == module.MOST_TIMES


@pytest.mark.parametrize(("kind", "width"), [("int8", 10240), ("int4", 6144)])
@pytest.mark.parametrize("fraction", [-0x1F8080, 0x1F7F80, -0x8080])
def test_the_longest_rows_with_the_largest_codes_and_bytes(kind: str, width: int, fraction: int) -> None:
    """All bytes of `x` that may be are -128, or near the largest; all codes the smallest, the largest, or both in turn."""
    assert can_handle(torch.zeros(1, width, dtype=torch.float16), (1, 128 if kind == "int4" else width), kind)
    low, high = (-8, 7) if kind == "int4" else (-128, 127)
    codes = torch.tensor([[low], [high], [low]]).repeat(1, width)
    codes[2, ::2] = high
    x = torch.full((1, width), fraction * 2.0**-20).half()
    x[:, :: width // 64] = 1.5
    if kind == "int4":
        scales = torch.full((3, width // 128), 0.001).half()
        given_ = QuantizedWeight(pack_planes((codes + 8).byte(), 128).to(DEVICE), scales.to(DEVICE), 1, 128)
    else:
        scales = torch.full((3, 1), 0.001)
        given_ = QuantizedWeight(codes.to(torch.int8).to(DEVICE), scales.to(DEVICE), 1, width)
    assert_close(integer_gemv(x.to(DEVICE), given_), x, codes.double() * scales[0, 0].double())


def test_one_token_goes_this_way() -> None:
    """`quant_gemv` hands it on."""
    given_, _ = made_up("int4", 6, 256, (1, 128))
    x = torch.randn(1, 256).to(DEVICE, torch.float16)
    assert torch.equal(quant_gemv(x, given_), integer_gemv(x, given_))


def test_what_it_is_for() -> None:
    """Neither for floats of 32 bits, nor for small groups, many tokens or long rows: `quant_gemv` has those."""
    half = torch.zeros(1, 4096, dtype=torch.float16)
    assert can_handle(half, (1, 128), "int4") and can_handle(half, (1, 4096), "int8")
    assert not can_handle(half.float(), (1, 128), "int4")
    assert not can_handle(half, (1, 64), "int4")
    assert not can_handle(half, (1, 32), "int8")
    assert not can_handle(half.expand(2, -1), (1, 128), "int4")
    assert not can_handle(half, (128, 128), "fp8")
    assert not can_handle(torch.zeros(1, 1 << 16, dtype=torch.float16), (1, 128), "int4")
