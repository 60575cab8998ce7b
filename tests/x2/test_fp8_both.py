"""Weights and activations in FP8: what is rounded, that it depends on a token alone, and who may ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from folovllm.electives.quantization.scaled import Fp8Both, rounded
from folovllm.layers.linear import LinearBase
from tests.contract import DEVICE
from tests.helpers import tiny_checkpoint
from tests.workloads import make_engine
from tests.x2.quantized import compressed, quantize_8, write_quantized

E4M3 = torch.float8_e4m3fn
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [16, 8], "modules_to_not_convert": ["lm_head"]}


def test_the_largest_of_a_row_becomes_the_largest_code() -> None:
    """Of 896 the scale is two: 3.1 is 1.55 of it, and 1.5 the nearest code; of each half alone, 3.1 is a code times a scale."""
    x = torch.tensor([[896.0, 0.0, 3.1, 0.0]])
    assert rounded(x, None).tolist() == [[896.0, 0.0, 3.0, 0.0]]
    torch.testing.assert_close(rounded(x, 2), x)
    assert rounded(torch.zeros(1, 4), None).tolist() == [[0.0] * 4]


def test_what_a_token_becomes_depends_on_that_token_alone() -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    for group in (None, 16):
        together = rounded(x, group)
        assert all(torch.equal(together[i : i + 1], rounded(x[i : i + 1], group)) for i in range(9))
        assert 0.01 < float((together - x).norm() / x.norm()) < 0.04


@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("columns", [False, True])
def test_kernel_rounds_alike(group: int | None, columns: bool) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from folovllm.electives.quantization.kernels.quantize_rows import quantize_rows
    from folovllm.electives.quantization.weight import has_fp8

    if not has_fp8(torch.device(DEVICE)):
        pytest.skip("this card has no numbers of FP8")
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(3, 112, generator=generator).to(DEVICE)
    x, factors = wide[:, :96], torch.rand(96, generator=generator).to(DEVICE) if columns else None
    codes, scales = quantize_rows(x, group, factors)
    assert codes.shape == (16, 96) and not codes[3:].float().any(), "the library multiplies 16 tokens or a multiple"
    numbers = codes.float().unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]
    expected = rounded(x if factors is None else x * factors, group)
    # A number between two codes may go either way: a product in another order is an ulp off.
    assert ((numbers.flatten(1)[:3] - expected).abs() > 1e-5).sum() <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 16, 300])
def test_product_on_a_gpu(blocks: bool, tokens: int) -> None:
    """By the library, in bfloat16, for any number of tokens."""
    from folovllm.electives.quantization.kernels.quantize_rows import fp8_matmul, serves
    from folovllm.electives.quantization.weight import QuantizedWeight

    generator = torch.Generator().manual_seed(2)
    weight = (torch.randn(256, 1024, generator=generator) * 64).clamp_(-400, 400).to(E4M3)
    rows, columns = (128, 128) if blocks else (1, 1024)
    scale = torch.rand(256 // rows, 1024 // columns, generator=generator) / 1000
    codes = QuantizedWeight(weight.to(DEVICE), scale.to(DEVICE), rows, columns)
    if not serves(codes):
        pytest.skip("this card does not multiply these")
    x = torch.randn(tokens, 1024, generator=generator).bfloat16().to(DEVICE)
    exact = weight.float() * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    expected = rounded(x.float(), 128 if blocks else None).double().cpu() @ exact.double().T
    error = (fp8_matmul(x, codes).double().cpu() - expected).norm() / expected.norm()
    assert error < 0.01, "the codes of both are multiplied, and their scales"


def checkpoint(folder: Path, config: dict[str, Any], dtype: torch.dtype = E4M3) -> Path:
    name, block = ("weight_scale_inv", (16, 8)) if config is BLOCKS else ("weight_scale", None)
    return write_quantized(tiny_checkpoint("qwen3"), folder, quantize_8(dtype, name, block), config)[0]


@pytest.mark.parametrize(
    "config", [BLOCKS, compressed(8, "float", "float-quantized", "channel")], ids=["blocks", "channel"]
)
def test_an_engine_that_is_asked_to_rounds_all_inputs(config: dict[str, Any], tmp_path: Path) -> None:
    model = checkpoint(tmp_path, config)
    engine = make_engine(model, milestone="m5", quantize_activations=True)
    whole = engine.executor._worker.runner.model  # type: ignore[attr-defined]
    linears = {name: module for name, module in whole.named_modules() if isinstance(module, LinearBase)}
    assert {type(linear.linear_method) for linear in linears.values()} == {Fp8Both}
    linear = next(iter(linears.values()))
    x = torch.randn(5, linear.input_size, generator=torch.Generator().manual_seed(3))
    exact = F.linear(x, linear.linear_method.dequantized(linear, x.dtype))
    with torch.inference_mode():
        error = (linear(x) - exact).norm() / exact.norm()
        torch.testing.assert_close(linear(x)[2:3], linear(x[2:3]))
    assert 0.005 < float(error) < 0.06


def test_who_may_not_ask_is_told(tmp_path: Path) -> None:
    needs = "needs weights in FP8, which this model has not: leave it out"
    with pytest.raises(ValueError, match=needs):
        make_engine(tiny_checkpoint("qwen3"), quantize_activations=True)
    whole_numbers = compressed(8, "int", "int-quantized", "channel")
    with pytest.raises(ValueError, match=needs):
        make_engine(checkpoint(tmp_path, whole_numbers, torch.int8), milestone="m5", quantize_activations=True)
    with pytest.raises(ValueError, match='needs model_impl="native"'):
        make_engine(tiny_checkpoint("qwen3"), milestone="m1", quantize_activations=True)
