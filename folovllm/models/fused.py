"""Layers whose element-wise work is one Triton kernel instead of several torch operations: same contracts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from folovllm.kernels.activation import gelu_and_mul, silu_and_mul
from folovllm.kernels.qk_norm_rope import Preparation, qk_norm_rope_store
from folovllm.kernels.rms_norm import add_rms_norm, rms_norm
from folovllm.kernels.skinny_linear import is_supported, skinny_linear
from folovllm.kernels.summed_linear import can_handle, summed_linear
from folovllm.layers.activation import SiluAndMul
from folovllm.layers.fusable import FusablePlain
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.linear import LinearBase
from folovllm.models.gemma3 import GeluAndMul, Gemma3RMSNorm
from folovllm.models.llama import LlamaAttention
from folovllm.models.qwen2 import Qwen2Attention
from folovllm.models.qwen3 import Qwen3Attention
from folovllm.step.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from folovllm.distributed.group import ProcessGroup


class FusedRMSNorm(RMSNorm):
    """Adds and norms in one pass."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return rms_norm(x.flatten(0, -2), self.weight, self.eps).view(x.shape)  # heads are rows too
        return add_rms_norm(x, residual, self.weight, self.eps)


class FusedSiluAndMul(SiluAndMul):
    """Gates and multiplies in one pass."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(gate_up)


class FusedGeluAndMul(GeluAndMul):
    """Gates and multiplies in one pass."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gelu_and_mul(gate_up)


class SkinnyLinear(FusablePlain):
    """Plain weights. With few tokens a kernel of our own reads them as fast as memory gives, and applies norm, gate and residual."""

    def fused(
        self, layer: LinearBase, x: torch.Tensor, norm_eps: float | None, gated: bool, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return skinny_linear(x, layer.weight, norm_eps, gated, residual)

    def summed(
        self, layer: LinearBase, x: torch.Tensor, group: ProcessGroup, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply and add up over ranks, in one kernel where these have one-shot buffers."""
        if group.one_shot_buffers is not None and self.fuses(layer, x) and can_handle(len(x), layer.weight):
            return summed_linear(x, layer.weight, group.one_shot_buffers, residual)
        return super().summed(layer, x, group, residual)

    def fuses(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """True for few tokens and no bias."""
        return layer.bias is None and can_use_skinny(x, layer.weight)


def can_use_skinny(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `skinny_linear` should multiply these. In the interpreter its many programs would take minutes."""
    return x.is_cuda and is_supported(len(x), weight)


class FusedLlamaAttention(LlamaAttention):
    """Rotates and stores into the cache in one pass, with QK-norm where the model has one."""

    def prepare(
        self, qkv: torch.Tensor, batch: ForwardBatch, stream: torch.Tensor | None = None, eps: float = 0.0
    ) -> torch.Tensor:
        """Return the queries, [T, Hq, D]; cache K and V. With `stream` [T, H], `qkv` comes from it without its norm."""
        query, key, value = self.split_heads(qkv)
        return qk_norm_rope_store(
            query, key, value, batch.positions, self.attn.kv_cache, batch.slot_mapping, self.preparation(), stream, eps
        )  # fmt: skip

    def preparation(self) -> Preparation:
        """Return what the kernel needs besides `qkv`."""
        return Preparation(self.rope.cos_sin_cache, scales=self.attn.backend.scales)


class FusedQwen3Attention(FusedLlamaAttention, Qwen3Attention):
    """With QK-norm."""

    def preparation(self) -> Preparation:
        weights = self.q_norm.weight, self.k_norm.weight
        return Preparation(self.rope.cos_sin_cache, *weights, self.q_norm.eps, self.attn.backend.scales)


class FusedGemma3RMSNorm(FusedRMSNorm, Gemma3RMSNorm):
    """The kernel takes weights of any dtype; it rounds once more than `Gemma3RMSNorm`, right before the weight."""


class FusedQwen2Attention(FusedLlamaAttention, Qwen2Attention):
    """The same as Llama's: the families differ in their biases alone."""


ATTENTION: dict[type[LlamaAttention], type[FusedLlamaAttention]] = {
    LlamaAttention: FusedLlamaAttention,
    Qwen2Attention: FusedQwen2Attention,
    Qwen3Attention: FusedQwen3Attention,
}


def fused_layers(head_dim: int) -> LayerSet:
    """Return the set in which every layer with a fused form takes that form.

    Attention stays plain where head_dim is no power of two, which a kernel's tile must be (flash-attn takes 80).
    """
    places: dict[type[nn.Module], Callable[..., nn.Module]] = {
        RMSNorm: FusedRMSNorm, SiluAndMul: FusedSiluAndMul,
        Gemma3RMSNorm: FusedGemma3RMSNorm, GeluAndMul: FusedGeluAndMul,
    }  # fmt: skip
    return LayerSet(places | (ATTENTION if head_dim & (head_dim - 1) == 0 else {}), kernels=True)
