"""A weight format is one class: the same model over weights of another kind, whole, with fused layers, and in pieces."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from folovllm.distributed.sharding import Weight, local_config, shard_named
from folovllm.layers.activation import SiluAndMul
from folovllm.layers.fusable import FusableLinearMethod, fusable, fused
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.linear import LinearBase, MergedColumnParallelLinear, Plain
from folovllm.layers.sharded import sharded
from folovllm.models.loader import load_model
from folovllm.models.registry import build_model
from tests.helpers import Driver, assert_logits_equal, tiny_checkpoint
from tests.m6.ranks import ThreadGroup, on_ranks


class Turned:
    """A stored [inputs, outputs], seen as [outputs, inputs]."""

    def __init__(self, stored: Weight) -> None:
        self.stored, self.shape = stored, torch.Size(reversed(stored.shape))

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        return self.stored[columns, rows].t()


class PerOutput:
    """A stored [outputs], seen as [outputs, inputs] of which inputs are never asked for."""

    def __init__(self, stored: Weight) -> None:
        self.stored, self.shape = stored, torch.Size([*stored.shape, 0])

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.stored[index[0] if isinstance(index, tuple) else index]


class EightBits(FusableLinearMethod):
    """Codes in 8 bits, which the checkpoint has transposed, and a scale for each output. Nothing is fused."""

    def create(self, layer: LinearBase) -> None:
        shape = (sum(layer.output_sizes), layer.input_size)
        layer.codes = nn.Parameter(torch.empty(shape, dtype=torch.int8), requires_grad=False)
        layer.scale = nn.Parameter(torch.empty(shape[0]))

    def weight_views(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        codes, scales = (torch.split(p.data, layer.output_sizes) for p in (layer.codes, layer.scale))
        return {"codes": [part.t() for part in codes], "scale": scales}

    def shard(self, kind: str, tensor: Weight, cut: Callable[[Weight], torch.Tensor]) -> torch.Tensor:
        if kind == "codes":
            return cut(Turned(tensor)).t()
        return cut(PerOutput(tensor) if kind == "scale" else tensor)

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, layer.codes.to(x.dtype) * layer.scale[:, None], layer.bias)
        return y if residual is None else residual.add_(y)


EIGHT_BITS = LayerSet(linear_method=EightBits())


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    """The same model twice: in 8 bits, and what these stand for as plain floats. Llama's, with all biases."""
    source = tiny_checkpoint("llama", tied=False, attention_bias=True, mlp_bias=True)
    coded, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        coded[name] = plain[name] = tensor
        if name.endswith("proj.weight"):
            scale = tensor.abs().amax(1) / 127
            codes = (tensor / scale[:, None]).round()
            plain[name] = codes * scale[:, None]
            coded.pop(name)
            coded[name.replace("weight", "codes")] = codes.to(torch.int8).t().contiguous()
            coded[name.replace("weight", "scale")] = scale
    for folder, tensors in (("coded", coded), ("plain", plain)):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / folder / "config.json").write_text((source / "config.json").read_text())
    return tmp_path / "coded", tmp_path / "plain"


def same_answers(coded: Driver, plain: Driver) -> None:
    for pieces in ({0: [5, 9, 3, 7]}, {0: [8], 1: [2]}):
        expected = plain.step(pieces)
        for seq, logits in coded.step(pieces).items():
            assert_logits_equal(logits, expected[seq])


def test_a_whole_model(checkpoints: tuple[Path, Path]) -> None:
    coded, plain = checkpoints
    driver = Driver(coded, layers=EIGHT_BITS)
    same_answers(driver, Driver(plain))
    linears = [module for module in driver.model.modules() if isinstance(module, LinearBase)]
    assert len(linears) == 12 and not any("weight" in dict(linear.named_parameters()) for linear in linears)


def test_layers_for_few_tokens_take_what_the_format_can(checkpoints: tuple[Path, Path]) -> None:
    """Neither folded nor fused where the format knows nothing of it."""
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from folovllm.models.fused_layer import DeferredNormDecoderLayer, SkinnyMLP
    from folovllm.models.llama import LlamaDecoderLayer, LlamaMLP

    coded, plain = checkpoints
    driver = Driver(coded, layers=EIGHT_BITS.having({LlamaDecoderLayer: DeferredNormDecoderLayer, LlamaMLP: SkinnyMLP}))
    same_answers(driver, Driver(plain))
    assert not any(layer.folded for layer in driver.model.model.layers)


def test_in_pieces(checkpoints: tuple[Path, Path]) -> None:
    """Ranks read their parts of codes and scales; query, and an MLP with its sum, are those of the whole."""
    (coded, plain), size = checkpoints, 4
    config = AutoConfig.from_pretrained(plain)
    whole = Driver(plain).model.model.layers[1]
    x = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(0))
    query = whole.self_attn.split_heads(whole.self_attn.qkv_proj(x))[0]

    def work(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        layers = sharded(EIGHT_BITS, group, config.vocab_size)
        model = build_model(local_config(config, size), torch.float32, "cpu", layers=layers)
        cut = partial(shard_named, head_dim=whole.self_attn.head_dim, rank=group.rank, size=size)
        load_model(model, coded, use_tqdm=False, shard=cut)
        layer = model.model.layers[1]
        return layer.self_attn.split_heads(layer.self_attn.qkv_proj(x))[0], layer.mlp(x)

    with torch.inference_mode():
        ranks = on_ranks(size, work)
        torch.testing.assert_close(torch.cat([own for own, _ in ranks], dim=1), query)
        for _, summed in ranks:
            torch.testing.assert_close(summed, whole.mlp(x))


class TestApply:
    """What comes before and after a product, by hand; for any format, as it is written without a kernel of its own."""

    def layer(self, bias: bool) -> LinearBase:
        torch.manual_seed(3)
        layer = MergedColumnParallelLinear(6, [4, 4], bias, Plain()).requires_grad_(False)
        for parameter in layer.parameters():
            parameter.normal_()
        return layer

    @pytest.mark.parametrize("bias", [False, True])
    def test_a_norm_a_gate_and_a_residual(self, bias: bool) -> None:
        layer, x, residual = self.layer(bias), torch.randn(3, 6), torch.randn(3, 8)
        normed = x / (x.square().mean(1, keepdim=True) + 0.1).sqrt()
        torch.testing.assert_close(fused(layer, x, norm_eps=0.1), layer(normed))
        torch.testing.assert_close(fused(layer, x, gated=True), SiluAndMul()(layer(x)))
        expected = residual + layer(x)
        torch.testing.assert_close(fused(layer, x, residual=residual.clone()), expected)

    def test_folding_moves_a_factor_from_the_inputs_to_the_columns(self) -> None:
        layer, x, scale = self.layer(False), torch.randn(3, 6), torch.randn(6)
        expected = layer(x * scale)
        method = fusable(layer.linear_method)
        assert method.can_fold(layer) and not method.can_fold(self.layer(True))
        method.fold(layer, scale)
        torch.testing.assert_close(layer(x), expected)
