"""Products with codes of 4 bits, by kernels, against torch in double precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from folovllm.electives.quantization.packing import pack_planes
from tests.contract import DEVICE

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.electives.quantization.kernels import quant_matmul as module
from folovllm.electives.quantization.kernels.int4_linear import int4_linear
from folovllm.electives.quantization.kernels.quant_gemv import quant_gemv
from folovllm.electives.quantization.kernels.quant_matmul import can_fetch, multiply, quant_matmul, unpacked
from folovllm.electives.quantization.weight import QuantizedWeight

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def made_up(outputs: int, inputs: int, group: int, zeros: str) -> tuple[Kept, torch.Tensor]:
    """Words, scales and zeros, and W in double precision."""
    generator = torch.Generator().manual_seed(inputs)
    shape = outputs, inputs // group
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator).byte()
    scales = (torch.rand(shape, generator=generator) + 0.1).half() / 50
    kept = {
        "none": None,
        "codes": torch.randint(0, 16, shape, generator=generator).byte(),
        "minimums": torch.randn(shape, generator=generator).half() / 10,
    }[zeros]
    numbers, scale = codes.double(), scales.double().repeat_interleave(group, 1)
    zero = torch.tensor(8.0) if kept is None else kept.double().repeat_interleave(group, 1)
    weight = numbers * scale + zero if zeros == "minimums" else (numbers - zero) * scale
    on = tuple(None if t is None else t.to(DEVICE) for t in (pack_planes(codes, group), scales, kept))
    return on, weight


def close(actual: torch.Tensor, expected: torch.Tensor, largest: torch.Tensor | None = None) -> None:
    """Equal but for rounding, which goes by the largest number; `largest` where the result is smaller than what was rounded."""
    allowed = ROUNDING[actual.dtype] * float(expected.abs().max() if largest is None else largest)
    assert actual.shape == expected.shape
    assert (actual.double().cpu() - expected).abs().max() <= allowed


def inputs_of(tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that lie apart."""
    wide = torch.randn(tokens, width + 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    return wide.to(DEVICE)[:, :width]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "group", "zeros"),
    [(1, 5, 96, 32, "none"), (2, 6, 384, 128, "codes"), (4, 3, 1088, 64, "minimums"), (1, 2, 1056, 1056, "codes")],
)
def test_few_tokens(dtype: torch.dtype, tokens: int, outputs: int, inputs: int, group: int, zeros: str) -> None:
    """Alone, and with all that comes before and after it; some rows and quads are past the end."""
    check_few(int4_linear, dtype, tokens, outputs, inputs, group, zeros)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "group", "zeros"),
    [(1, 5, 768, 128, "none"), (2, 6, 768, 256, "codes"), (4, 3, 384, 128, "minimums"), (1, 2, 288, 288, "codes")],
)
def test_few_tokens_on_tensor_cores(
    dtype: torch.dtype, tokens: int, outputs: int, inputs: int, group: int, zeros: str
) -> None:
    """The same; some tiles are past the end, and one group is no whole number of tiles."""
    check_few(on_tensor_cores, dtype, tokens, outputs, inputs, group, zeros)


def weight_of(words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> QuantizedWeight:
    return QuantizedWeight(words, scales, 1, 8 * words.shape[1] // scales.shape[1], zeros)


def on_tensor_cores(x: torch.Tensor, *kept: torch.Tensor | None, **more: object) -> torch.Tensor:
    return quant_gemv(x, weight_of(*kept), **more)  # type: ignore[arg-type]


def check_few(
    int4_linear: Callable[..., torch.Tensor], dtype: torch.dtype, tokens: int, outputs: int, inputs: int, group: int, zeros: str
) -> None:  # fmt: skip
    kept, weight = made_up(outputs, inputs, group, zeros)
    x = inputs_of(tokens, inputs, dtype)
    exact = x.double().cpu() @ weight.t()
    close(int4_linear(x, *kept), exact)
    residual = torch.randn(tokens, outputs, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    normed = F.rms_norm(x.double().cpu(), (inputs,), eps=1e-5) @ weight.t()
    close(int4_linear(x, *kept, norm_eps=1e-5, residual=residual), normed + residual.double().cpu())
    if outputs % 2 == 0:
        columns = torch.rand(inputs, generator=torch.Generator().manual_seed(2)).to(dtype)
        gate, up = (F.rms_norm(x.double().cpu(), (inputs,), eps=1e-5) * columns @ weight.t()).chunk(2, 1)
        h = int4_linear(x, *kept, norm_eps=1e-5, gated=True, columns=columns.to(DEVICE))
        close(h, F.silu(gate) * up, gate.abs().max() * up.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "group", "zeros"),
    [(3, 9, 96, 32, "minimums"), (17, 70, 384, 128, "none"), (5, 5, 4096, 256, "codes"), (2, 5, 576, 192, "none")],
)
def test_some_tokens(dtype: torch.dtype, tokens: int, outputs: int, inputs: int, group: int, zeros: str) -> None:
    """Within a group and across groups, in one part and in several."""
    kept, weight = made_up(outputs, inputs, group, zeros)
    x = inputs_of(tokens, inputs, dtype)
    exact = x.double().cpu() @ weight.t()
    close(quant_matmul(x, weight_of(*kept)), exact)
    residual = torch.randn(tokens, outputs, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    close(quant_matmul(x, weight_of(*kept), residual), exact + residual.double().cpu())


@pytest.mark.skipif(DEVICE != "cpu", reason="the card decides")
@pytest.mark.parametrize(("tokens", "inputs", "group", "zeros"), [(5, 2048, 128, "codes"), (130, 256, 128, "none")])
def test_inputs_that_the_copy_engine_fetches(
    monkeypatch: pytest.MonkeyPatch, tokens: int, inputs: int, group: int, zeros: str
) -> None:
    """As on Hopper; behind the last token it reads zeros."""
    monkeypatch.setattr(module, "capability_of", lambda device: 90)
    kept, weight = made_up(70, inputs, group, zeros)
    x = inputs_of(tokens, inputs, torch.float16)
    assert can_fetch(x, group)
    close(quant_matmul(x, weight_of(*kept)), x.double() @ weight.t())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs", "zeros"),
    [(1, 256, "codes"), (1000, 4096, "none"), (130, 9728, "codes"), (17_001, 640, "none"), (384, 512, "minimums")],
)
def test_many_tokens(outputs: int, inputs: int, zeros: str) -> None:
    """The same bits again, and beside tokens that are no numbers; memory that a product is about to get has none either."""
    kept, weight = made_up(outputs, inputs, 128, zeros)
    for tokens in (17, 64, 100, 129, 256, 700):
        x = inputs_of(tokens, inputs, torch.bfloat16)
        expected = x.double() @ weight.to(DEVICE).t()
        filled = [torch.full((16 << 20,), float("nan"), device=DEVICE), torch.full_like(expected, float("nan"))]
        filled.clear()
        y = multiply(x, weight_of(*kept))
        assert (y.double() - expected).norm() <= 0.006 * expected.norm()
        x[tokens // 2 :] = float("nan")
        assert torch.equal(multiply(x, weight_of(*kept))[: tokens // 2], y[: tokens // 2])


@pytest.mark.parametrize(("inputs", "group"), [(96, 32), (256, 128), (192, 192)])
@pytest.mark.parametrize("zeros", ["none", "codes", "minimums"])
def test_unpacked(zeros: str, inputs: int, group: int) -> None:
    kept, weight = made_up(3, inputs, group, zeros)
    close(unpacked(weight_of(*kept), torch.float32), weight)
