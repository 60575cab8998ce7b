"""A decode on a CPU: a decoder layer is one call.

Torch's product for one row leaves most of the memory's bandwidth unused, and between the products a layer has two dozen small
operations, each of which Python calls for. With few tokens both together take far longer than reading the weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from folovllm.kernels.cpu.ops import CpuKernels, Heads, Layer, at, linear_of
from folovllm.layers.embed_head import ParallelLMHead
from folovllm.layers.fusable import FusablePlain
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.linear import LinearBase, RowParallelLinear
from folovllm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from folovllm.models.qwen2 import Qwen2Attention
from folovllm.models.qwen3 import Qwen3Attention
from folovllm.step.forward_batch import ForwardBatch


class CpuPlain(FusablePlain):
    """Plain weights. The library's product for one row reaches a third of the memory's bandwidth in bfloat16 and float32."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is None and self._kernels.multiplies(x, layer.weight):
            return self._kernels.multiply(x, layer.weight, layer.bias)
        return super().product(layer, x, residual)


class CpuDecoderLayer(LlamaDecoderLayer):
    """Computes few decodes in one call, and any other batch as `LlamaDecoderLayer`."""

    def __init__(self, *args: Any, kernels: CpuKernels) -> None:
        super().__init__(*args)
        self._kernels = kernels
        self._layer: Layer | None = None

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what `LlamaDecoderLayer` does, [T, H] twice. `x` and `residual` may be overwritten."""
        cache = self.self_attn.attn.kv_cache
        if self._layer is None or not self._kernels.decodes(batch, cache):
            return super().forward(x, residual, batch)
        residual = torch.zeros_like(x) if residual is None else residual
        self._kernels.decoder_layer(self._layer, cache, batch, x, residual)
        return x, residual

    def weights_loaded(self) -> None:
        """Note where the weights are; not of layers that have more to do: experts, codes, ranks, a window."""
        attention, mlp = self.self_attn, self.mlp
        kinds = type(attention), type(mlp), type(attention.o_proj)
        ours = kinds[0] in ATTENTION and kinds[1:] == (LlamaMLP, RowParallelLinear) and attention.attn.window is None
        self._layer = None
        if ours and all(type(m.linear_method) is CpuPlain for m in self.modules() if isinstance(m, LinearBase)):
            linears = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
            norms = self.input_layernorm, self.post_attention_layernorm
            self._layer = Layer(
                *(linear_of(linear.weight, linear.bias) for linear in linears), heads_of(attention),
                *(at(norm.weight) for norm in norms), *(norm.eps for norm in norms),
            )  # fmt: skip


ATTENTION = (LlamaAttention, Qwen2Attention, Qwen3Attention)


def heads_of(attention: LlamaAttention) -> Heads:
    """What the heads of a layer go through."""
    shape = attention.num_heads, attention.num_kv_heads, attention.head_dim
    heads = Heads(*shape, attention.head_dim**-0.5, cos_sin=at(attention.rope.cos_sin_cache))
    if isinstance(attention, Qwen3Attention):
        query, key = attention.q_norm, attention.k_norm
        heads.query_norm, heads.key_norm, heads.eps = at(query.weight), at(key.weight), query.eps
    return heads


class CpuHead(ParallelLMHead):
    """The largest product of a step, by the kernel for few rows."""

    def __init__(self, vocab_size: int, hidden_size: int, *, kernels: CpuKernels) -> None:
        super().__init__(vocab_size, hidden_size)
        self._kernels = kernels

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._kernels.multiplies(hidden, self.weight):
            return self._kernels.multiply(hidden, self.weight, out=out)
        return super().forward(hidden, out)


def cpu_layers(kernels: CpuKernels) -> LayerSet:
    """Return the set in which few tokens go through the kernels for a CPU."""
    places = {LlamaDecoderLayer: CpuDecoderLayer, ParallelLMHead: CpuHead}
    return LayerSet({kind: partial(own, kernels=kernels) for kind, own in places.items()}, CpuPlain(kernels))
