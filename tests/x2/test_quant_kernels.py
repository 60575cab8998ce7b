"""Products with codes of 8 bits, by kernels, against torch in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.contract import DEVICE

pytest.importorskip("triton", reason="Triton is for Linux only")

import triton
import triton.language as tl

from folovllm.electives.quantization.kernels import integer_gemv
from folovllm.electives.quantization.kernels import quant_gemv as few
from folovllm.electives.quantization.kernels import quant_matmul as many
from folovllm.electives.quantization.kernels.gemv_tiles import as_halves
from folovllm.electives.quantization.weight import QuantizedWeight, has_fp8

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
KINDS = ["int8", "fp8", "fp8_bits"]


def made_up(
    kind: str, outputs: int, inputs: int, block: tuple[int, int] | None
) -> tuple[QuantizedWeight, torch.Tensor]:
    """Codes, all of them somewhere, and W in double precision."""
    generator = torch.Generator().manual_seed(inputs)
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, generator=generator)
    codes = torch.where(codes & 0x7F == 0x7F, 5, codes).view(torch.int8 if kind == "int8" else E4M3)
    rows, columns = block or (1, inputs)
    shape = -(-outputs // rows), -(-inputs // columns)
    scale = (torch.rand(shape, generator=generator) + 0.1) / (100 if kind == "int8" else 200)
    wide = scale.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
    return QuantizedWeight(codes.to(DEVICE), scale.to(DEVICE), rows, columns), codes.double() * wide.double()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "fp8" and not has_fp8(torch.device(DEVICE)):
        pytest.skip("this card has no numbers of FP8")
    for module in (few, integer_gemv, many):
        monkeypatch.setattr(module, "kind_of", lambda weight: request.param)
    return request.param


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    allowed = ROUNDING[actual.dtype] * float(expected.abs().max())
    assert (actual.double().cpu() - expected).abs().max() <= allowed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "block"), [(1, 5, 48, None), (2, 6, 304, (2, 16)), (4, 4, 96, (2, 32))]
)
def test_few_tokens(kind: str, dtype: torch.dtype, tokens: int, outputs: int, inputs: int, block: object) -> None:
    """Alone, and with all that comes before and after it; some rows and units are past the end."""
    codes, weight = made_up(kind, outputs, inputs, block)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(tokens, inputs + 16, generator=generator).to(dtype)
    x, columns = wide[:, :inputs], torch.rand(inputs, generator=generator).to(dtype)
    on = x.to(DEVICE) if DEVICE != "cpu" else x
    close(few.quant_gemv(on, codes), x.double() @ weight.T)
    residual = torch.randn(tokens, outputs, generator=generator).to(dtype)
    normed = F.rms_norm(x.double(), (inputs,), eps=1e-5) * columns.double()
    actual = few.quant_gemv(on, codes, 1e-5, residual=residual.to(DEVICE), columns=columns.to(DEVICE))
    close(actual, normed @ weight.T + residual.double())
    if outputs % 2 == 0:
        gate, up = (normed @ weight.T).chunk(2, 1)
        close(few.quant_gemv(on, codes, 1e-5, gated=True, columns=columns.to(DEVICE)), F.silu(gate) * up)


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
    out = out.cpu()
    for actual, expected, off in zip(out.ravel(), x.ravel(), allowed.ravel(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=float(off), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "block"), [(3, 40, 80, None), (20, 33, 256, (16, 128)), (70, 64, 96, (1, 32))]
)
def test_some_tokens(kind: str, dtype: torch.dtype, tokens: int, outputs: int, inputs: int, block: object) -> None:
    codes, weight = made_up(kind, outputs, inputs, block)
    x, residual = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, outputs).to(dtype)
    close(many.quant_matmul(x.to(DEVICE), codes), x.double() @ weight.T)
    actual = many.quant_matmul(x.to(DEVICE), codes, residual.to(DEVICE))
    close(actual, x.double() @ weight.T + residual.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [None, (4, 16)])
def test_unpacked(kind: str, dtype: torch.dtype, block: object) -> None:
    codes, weight = made_up(kind, 6, 48, block)
    close(many.unpacked(codes, dtype), weight)
