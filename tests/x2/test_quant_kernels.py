"""Products with codes of 8 and 4 bits, by kernels, against torch in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.contract import DEVICE
from tests.x2.quantized import made_up

pytest.importorskip("triton", reason="Triton is for Linux only")

import triton
import triton.language as tl

from folovllm.electives.quantization.kernels import integer_gemv
from folovllm.electives.quantization.kernels import quant_gemv as few
from folovllm.electives.quantization.kernels import quant_matmul as many
from folovllm.electives.quantization.kernels.gemv_tiles import as_halves
from folovllm.electives.quantization.kernels.int4_linear import int4_linear
from folovllm.electives.quantization.weight import QuantizedWeight, has_fp8

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BYTES = ["int8", "fp8", "fp8_bits"]
Sizes = tuple[Any, ...]  # tokens, outputs, inputs, block, zeros
UseKind = Callable[[str], None]


@pytest.fixture
def use_kind(monkeypatch: pytest.MonkeyPatch) -> UseKind:
    """Let kernels take 8 bits for this kind of numbers: one may stand for another kind on a card that has none of these."""

    def use(kind: str) -> None:
        if kind == "fp8" and not has_fp8(torch.device(DEVICE)):
            pytest.skip("this card has no numbers of FP8")
        for module in (few, integer_gemv, many) if kind != "int4" else ():
            monkeypatch.setattr(module, "kind_of", lambda weight: kind)

    return use


def close(actual: torch.Tensor, expected: torch.Tensor, largest: torch.Tensor | None = None) -> None:
    """Equal but for rounding, which goes by the largest number; `largest` where the result is smaller than what was rounded."""
    allowed = ROUNDING[actual.dtype] * float(expected.abs().max() if largest is None else largest)
    assert actual.shape == expected.shape
    assert (actual.double().cpu() - expected).abs().max() <= allowed


def inputs_of(tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that lie apart."""
    wide = torch.randn(tokens, width + 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    return wide.to(DEVICE)[:, :width]


def by_threads(x: torch.Tensor, w: QuantizedWeight, *more: Any, **named: Any) -> torch.Tensor:
    return int4_linear(x, w.weight, w.scale, w.zeros, *more, **named)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("product", "kind", "sizes"),
    [
        *((by_threads, "int4", sizes) for sizes in (
            (1, 5, 96, 32, "none"), (2, 6, 384, 128, "codes"), (4, 3, 1088, 64, "minimums"), (1, 2, 1056, 1056, "codes"))),
        *((few.quant_gemv, "int4", sizes) for sizes in (
            (1, 5, 768, 128, "none"), (2, 6, 768, 256, "codes"), (4, 3, 384, 128, "minimums"), (1, 2, 288, 288, "codes"))),
        *((few.quant_gemv, kind, sizes) for kind in BYTES for sizes in (
            (1, 5, 48, None), (2, 6, 304, (2, 16)), (4, 4, 96, (2, 32)))),
    ],
)  # fmt: skip
def test_few_tokens(product: Any, kind: str, sizes: Sizes, dtype: torch.dtype, use_kind: UseKind) -> None:
    """Alone, and with all that comes before and after it. Some rows, quads and tiles are past the end."""
    use_kind(kind)
    (tokens, outputs, inputs, block), zeros = sizes[:4], sizes[4:]
    kept, weight = made_up(kind, outputs, inputs, (1, block) if kind == "int4" else block, *zeros)
    x, generator = inputs_of(tokens, inputs, dtype), torch.Generator().manual_seed(1)
    columns, residual = (torch.rand(size, generator=generator).to(dtype) for size in ((inputs,), (tokens, outputs)))
    close(product(x, kept), x.double().cpu() @ weight.T)
    normed = F.rms_norm(x.double().cpu(), (inputs,), eps=1e-5)
    close(product(x, kept, 1e-5, residual=residual.to(DEVICE)), normed @ weight.T + residual.double())
    exact, gated, largest = normed * columns.double() @ weight.T, outputs % 2 == 0, None
    if gated:
        gate, up = exact.chunk(2, 1)
        exact, largest = F.silu(gate) * up, gate.abs().max() * up.abs().max() if kind == "int4" else None
    close(product(x, kept, 1e-5, gated, columns=columns.to(DEVICE)), exact, largest)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("block", [None, (2, 64)])
def test_one_token_of_several_groups(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block: object) -> None:
    """In float16 `x` is divided by its largest, so it may have any size; the last program has more groups than rows."""
    if not has_fp8(torch.device(DEVICE)):
        pytest.skip("this card has no numbers of FP8")
    monkeypatch.setattr(few, "PROGRAMS", 1)
    codes, weight = made_up("fp8", 10, 2624, block)
    x = torch.randn(1, 2624, generator=torch.Generator().manual_seed(0))
    x[0, 1600:] *= 1e6 if dtype == torch.bfloat16 else 1000  # a float16 ends at 65,504
    close(few.quant_gemv(x.to(DEVICE, dtype), codes), x.to(dtype).double() @ weight.T)
    zero = torch.zeros(1, 2624, dtype=dtype, device=DEVICE)
    assert not few.quant_gemv(zero, codes).any()


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("values", [(torch.inf,), (-torch.inf,), (torch.nan,), (torch.inf, torch.nan)])
def test_one_token_that_is_not_finite(dtype: torch.dtype, values: tuple[float, ...]) -> None:
    """Inf makes Inf, but NaN where it meets zero or another sign; NaN makes NaN."""
    if not has_fp8(torch.device(DEVICE)):
        pytest.skip("this card has no numbers of FP8")
    codes, weight = made_up("fp8", 10, 2608, None)
    codes.weight.view(torch.uint8)[3, 7] = 0
    weight[3, 7] = 0
    x = torch.randn(1, 2608, generator=torch.Generator().manual_seed(0)).to(dtype)
    for place, value in zip((7, 2000), values, strict=False):
        x[0, place] = value
    expected = x.double() @ weight.T
    assert expected[0, 3].isnan() and not expected.isfinite().any()
    torch.testing.assert_close(
        few.quant_gemv(x.to(DEVICE), codes).double().cpu(), expected, rtol=0, atol=0, equal_nan=True
    )


@triton.jit
def there_and_back_kernel(x_ptr, out_ptr):
    """`x` [16, 8] by way of `as_halves`."""
    at = tl.arange(0, 16)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    halves, peak = as_halves((tl.load(x_ptr + at),))
    tl.store(out_ptr + at, halves[0].to(tl.float32) * peak)


def test_numbers_of_any_size_survive_as_halves() -> None:
    """Each column by itself: the largest floats, the smallest, zeros, Inf beside others, and NaN."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    x *= torch.tensor([1, 1.1e38, 1e-37, 1e-39, 0, 1, 1e38, 1e-30])
    x[4, 0], x[5, 5], x[6, 6] = 1e30, torch.inf, torch.nan
    out = torch.empty_like(x).to(DEVICE)
    there_and_back_kernel[(1,)](x.to(DEVICE), out)
    largest = x.abs().nan_to_num(0, posinf=2.0**125).amax(0).clamp(max=2.0**125)
    allowed = 1.01 * (x.abs().nan_to_num(0, posinf=0) * 2.0**-11 + largest * 2.0**-25) + 2e-45  # a card divides roughly
    for actual, expected, off in zip(out.cpu().ravel(), x.ravel(), allowed.ravel(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=float(off), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *(("int4", sizes) for sizes in (
            (3, 9, 96, 32, "minimums"), (17, 70, 384, 128, "none"), (5, 5, 4096, 256, "codes"), (2, 5, 576, 192, "none"))),
        *((kind, sizes) for kind in BYTES for sizes in ((3, 40, 80, None), (20, 33, 256, (16, 128)), (70, 64, 96, (1, 32)))),
    ],
)  # fmt: skip
def test_some_tokens(kind: str, sizes: Sizes, dtype: torch.dtype, use_kind: UseKind) -> None:
    """Within a group and across groups, in one part and in several."""
    use_kind(kind)
    (tokens, outputs, inputs, block), zeros = sizes[:4], sizes[4:]
    kept, weight = made_up(kind, outputs, inputs, (1, block) if kind == "int4" else block, *zeros)
    x = inputs_of(tokens, inputs, dtype)
    residual = torch.randn(tokens, outputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = x.double().cpu() @ weight.T
    close(many.quant_matmul(x, kept), exact)
    close(many.quant_matmul(x, kept, residual.to(DEVICE)), exact + residual.double())


@pytest.mark.skipif(DEVICE != "cpu", reason="the card decides")
@pytest.mark.parametrize(("tokens", "inputs", "group", "zeros"), [(5, 2048, 128, "codes"), (130, 256, 128, "none")])
def test_inputs_that_the_copy_engine_fetches(
    monkeypatch: pytest.MonkeyPatch, tokens: int, inputs: int, group: int, zeros: str
) -> None:
    """As on Hopper; behind the last token it reads zeros."""
    monkeypatch.setattr(many, "capability_of", lambda device: 90)
    kept, weight = made_up("int4", 70, inputs, (1, group), zeros)
    x = inputs_of(tokens, inputs, torch.float16)
    assert many.can_fetch(x, group)
    close(many.quant_matmul(x, kept), x.double() @ weight.T)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs", "zeros"),
    [(1, 256, "codes"), (1000, 4096, "none"), (130, 9728, "codes"), (17_001, 640, "none"), (384, 512, "minimums")],
)
def test_many_tokens(outputs: int, inputs: int, zeros: str) -> None:
    """The same bits again, and beside tokens that are no numbers; memory that a product is about to get has none either."""
    kept, weight = made_up("int4", outputs, inputs, (1, 128), zeros)
    for tokens in (17, 64, 100, 129, 256, 700):
        x = inputs_of(tokens, inputs, torch.bfloat16)
        expected = x.double() @ weight.to(DEVICE).t()
        filled = [torch.full((16 << 20,), float("nan"), device=DEVICE), torch.full_like(expected, float("nan"))]
        filled.clear()
        y = many.multiply(x, kept)
        assert (y.double() - expected).norm() <= 0.006 * expected.norm()
        x[tokens // 2 :] = float("nan")
        assert torch.equal(many.multiply(x, kept)[: tokens // 2], y[: tokens // 2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *(("int4", (3, inputs, (1, group), zeros)) for inputs, group in ((96, 32), (256, 128), (192, 192))
          for zeros in ("none", "codes", "minimums")),
        *((kind, (6, 48, block)) for kind in BYTES for block in (None, (4, 16))),
    ],
)  # fmt: skip
def test_unpacked(kind: str, sizes: Sizes, dtype: torch.dtype, use_kind: UseKind) -> None:
    use_kind(kind)
    kept, weight = made_up(kind, *sizes)
    close(many.unpacked(kept, dtype), weight)
