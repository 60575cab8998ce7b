"""FP8 times FP8: what is rounded, which product multiplies, and who asks for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from folovllm.electives.quantization.config import REQUESTED
from folovllm.electives.quantization.fp8 import Fp8, QuantizedRows
from folovllm.electives.quantization.linear_method import keep
from folovllm.layers.linear import LinearBase
from folovllm.models.loader import load_model
from tests.contract import DEVICE
from tests.helpers import Driver, assert_logits_equal, tiny_checkpoint
from tests.workloads import make_engine
from tests.x2.quantized import BYTE_KINDS as KINDS
from tests.x2.quantized import E4M3, compressed, made_up, quantize_8, rounded, write_quantized

CHANNEL = compressed(8, "float", "float-quantized", "channel")
CHANNEL["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def relative(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def floats_of(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What codes stand for, float64."""
    return (codes.double().unflatten(1, (scales.shape[1], -1)) * scales[:, :, None].double()).flatten(1)


@pytest.fixture
def quantize_rows() -> Any:
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from folovllm.electives.quantization.kernels.quantize_rows import quantize_rows
    from folovllm.electives.quantization.weight import has_fp8

    if not has_fp8(torch.device(DEVICE)):
        pytest.skip("this card has no numbers of FP8")
    return quantize_rows


@pytest.mark.parametrize("group", [None, 16])
class TestRounding:
    """The kernel against torch. A number between two codes may go either way: a product in another order is an ulp off."""

    @pytest.mark.parametrize("columns", [False, True])
    def test_rows(self, quantize_rows: Any, group: int | None, columns: bool) -> None:
        x, factors = drawn((3, 112), 1)[:, :96], drawn((96,), 4).abs() if columns else None
        codes, scales = quantize_rows(x, group, factors)
        assert codes.shape == (16, 96) and not codes[3:].float().any(), "the library multiplies 16 tokens or a multiple"
        expected = rounded(x if factors is None else x * factors, group)
        assert ((floats_of(codes, scales)[:3] - expected).abs() > 1e-5).sum() <= 2

    def test_what_is_normed_or_gated_first(self, quantize_rows: Any, group: int | None) -> None:
        x = drawn((3, 192), 1)
        normed = F.rms_norm(x, (192,), eps=1e-6)
        assert ((floats_of(*quantize_rows(x, group, None, 1e-6))[:3] - rounded(normed, group)).abs() > 1e-5).sum() <= 2
        hidden = F.silu(x[:, :96]) * x[:, 96:]
        assert ((floats_of(*quantize_rows(x, group, gated=True))[:3] - rounded(hidden, group)).abs() > 1e-5).sum() <= 2


def test_a_scale_that_is_known(quantize_rows: Any) -> None:
    """What is beyond the largest code becomes that."""
    x = drawn((3, 96), 1)
    codes, scales = quantize_rows(x, static=torch.full((2,), 0.004, device=DEVICE))
    expected = (x / 0.004).clamp(-448, 448).to(E4M3).double() * 0.004
    assert set(scales.flatten().tolist()) == {scales[0, 0].item()} and codes.float().abs().max() == 448
    assert ((floats_of(codes, scales)[:3] - expected).abs() > 1e-5).sum() <= 2


SHAPES = [  # tokens, outputs, inputs, block: outputs that fill no tile, tiles that programs share, more than one tile of tokens
    (1, 80, 96, None), (3, 100, 768, None), (20, 64, 1536, None), (130, 80, 64, None), (5, 128, 256, (64, 64)), (20, 96, 320, (32, 64)),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "rows", "width", "block"), SHAPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("capability", [80, 90])
def test_product(
    quantize_rows: Any, tokens: int, rows: int, width: int, block: tuple[int, int] | None, residual: bool, capability: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Codes are multiplied exactly, whatever the dtype of the result and however they are read."""
    from folovllm.electives.quantization.kernels import fp8_linear
    from folovllm.electives.quantization.kernels.fp8_linear import fp8_product

    if DEVICE == "cpu":
        monkeypatch.setattr(fp8_linear, "capability_of", lambda device: capability)
    weight, exact = made_up("fp8", rows, width, block)
    exact = exact.to(DEVICE)
    for dtype in (torch.float32, torch.float16):
        codes, scales = quantize_rows(drawn((tokens, width), 1, dtype), block and block[1])
        expected = floats_of(codes, scales)[:tokens] @ exact.T
        added = drawn((tokens, rows), 5, dtype) if residual else None
        expected += 0 if added is None else added.double()
        result = fp8_product(codes, scales, weight, tokens, dtype, added)
        assert result.dtype == dtype and relative(result, expected) < (1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize(("width", "block"), [(96, None), (512, None), (512, (16, 128)), (2048, (8, 128))])
@pytest.mark.parametrize("gated", [False, True])
def test_one_token_is_rounded_alike(quantize_rows: Any, width: int, block: tuple[int, int] | None, gated: bool) -> None:
    """Each program rounds all inputs for itself, and has the codes that many tokens have."""
    from folovllm.electives.quantization.kernels.quant_gemv import quant_gemv

    weight, exact = made_up("fp8", 48, width, block)
    exact = exact.to(DEVICE)
    for dtype in (torch.float32, torch.float16):
        x, columns = drawn((1, width), 1, dtype), drawn((width,), 4, dtype).abs()
        expected = floats_of(*quantize_rows(x, block and 128, columns, 1e-6))[:1] @ exact.T
        if gated:
            gate, up = expected.chunk(2, 1)
            expected = F.silu(gate) * up
        result = quant_gemv(x, weight, 1e-6, gated, None, columns, rounds=True)
        assert relative(result, expected) < (1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("block", [None, (128, 128)])
@pytest.mark.parametrize("tokens", [1, 2, 5, *(pytest.param(n, marks=pytest.mark.gpu) for n in (16, 64, 129, 300))])
def test_a_layer(
    quantize_rows: Any, tokens: int, block: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ways to multiply, with norm, gate and residual, against torch with the same rounding; and the product that follows."""
    dtype, width, outputs = torch.bfloat16, 1024, 256
    if DEVICE == "cpu":  # as on a card that multiplies FP8 by FP8
        monkeypatch.setattr(Fp8, "multiplies_fp8", lambda *_: True)
        dtype, width, outputs = torch.float16, 256, 128
    linear_method = Fp8(block=block, rounds=True)

    def layer_of(inputs: int, sizes: list[int]) -> tuple[LinearBase, torch.Tensor]:
        weight, exact = made_up("fp8", sum(sizes), inputs, block)
        with torch.device(DEVICE):
            torch.set_default_dtype(dtype)
            layer = LinearBase(inputs, sizes, linear_method=linear_method)
            torch.set_default_dtype(torch.float32)
        keep(layer, replace(weight, scale=weight.scale / 8))
        return layer, exact.to(DEVICE) / 8

    layer, exact = layer_of(width, [outputs, outputs])
    x, residual = drawn((tokens, width), 1, dtype), drawn((tokens, 2 * outputs), 5, dtype)
    plain = rounded(x.float(), block and block[1]).double() @ exact.T
    gate, up = (plain * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-6)).chunk(2, 1)
    assert linear_method.fuses(layer, x)
    assert relative(linear_method.apply(layer, x, residual=residual.clone()), plain + residual.double()) < 0.005
    hidden = F.silu(gate) * up
    assert relative(linear_method.apply(layer, x, 1e-6, gated=True), hidden) < 0.01
    rows = replace(linear_method, rounds_gated=True).apply(layer, x, 1e-6, gated=True)
    assert isinstance(rows, QuantizedRows) == (tokens > 1), "one token is rounded by the product itself"
    (down, exact), added = layer_of(outputs, [outputs]), residual[:, :outputs]
    expected = rounded(hidden.float(), block and block[1]).double() @ exact.T + added
    assert relative(linear_method.apply(down, rows, residual=added.clone()), expected) < 0.05


def methods_of(engine: Any) -> dict[str, Any]:
    model = engine.executor._worker.runner.model
    return {name: module.linear_method for name, module in model.named_modules() if isinstance(module, LinearBase)}


@pytest.mark.parametrize("kind", ["fp8 blocks", "dynamic channel", "fp8 static"])
def test_what_a_checkpoint_means(kind: str, tmp_path: Path) -> None:
    """Activations are quantized, unless somebody asks for weights alone. Merged layers share the largest scale of inputs."""
    written = (quantize_8(E4M3, "weight_scale", None), CHANNEL) if kind == "dynamic channel" else KINDS[kind]
    model = write_quantized(tiny_checkpoint("qwen3"), tmp_path, *written)[0]
    engine: Any = make_engine(model, milestone="m5")
    methods, is_static = methods_of(engine), kind == "fp8 static"
    assert {(m.rounds, m.layout.inputs is not None) for m in methods.values()} == {(True, is_static)}
    gated = next(method for name, method in methods.items() if name.endswith("gate_up_proj"))
    assert gated.rounds_gated == (not is_static)
    weights_alone = methods_of(make_engine(model, quantize_activations=False)).values()
    assert {(m.rounds, m.layout.inputs) for m in weights_alone} == {(False, None)}
    if is_static:
        qkv = engine.executor._worker.runner.model.model.layers[0].self_attn.qkv_proj
        torch.testing.assert_close(qkv.quantized.input_scale, torch.full((3,), max(qkv.output_sizes) / 1000))


def test_a_checkpoint_in_16_bits_is_quantized_while_it_is_loaded(tmp_path: Path) -> None:
    """The same numbers as in a checkpoint that was quantized before, a scale for each output."""
    source, online = tiny_checkpoint("qwen3"), REQUESTED["fp8"]
    before = write_quantized(source, tmp_path / "before", quantize_8(E4M3, "weight_scale", None), CHANNEL)[0]
    meanwhile = write_quantized(source, tmp_path / "while", lambda weight: ({"weight": weight}, weight), online)[0]
    ours, theirs = Driver(meanwhile), Driver(before)
    assert_logits_equal(ours.step({0: [5, 9, 3]})[0], theirs.step({0: [5, 9, 3]})[0])
    assert ours.model.model.layers[0].mlp.down_proj.weight.dtype == E4M3  # type: ignore[union-attr]
    load_model(ours.model, meanwhile, use_tqdm=False)
    assert_logits_equal(ours.step({1: [5, 9, 3]})[1], theirs.step({1: [5, 9, 3]})[1])
