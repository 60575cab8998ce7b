"""Layers whose element-wise work is one Triton kernel instead of several torch operations: same names, same contracts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from folovllm.forward_batch import ForwardBatch
from folovllm.kernels.activation import silu_and_mul
from folovllm.kernels.preparation import Preparation
from folovllm.kernels.qk_norm_rope import qk_norm_rope_store
from folovllm.kernels.rms_norm import add_rms_norm, rms_norm
from folovllm.layers.activation import SiluAndMul
from folovllm.layers.layernorm import RMSNorm
from folovllm.models.llama import LlamaAttention
from folovllm.models.qwen2 import Qwen2Attention
from folovllm.models.qwen3 import Qwen3Attention


class FusedRMSNorm(RMSNorm):
    """Sum and norm in one pass."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As `RMSNorm`."""
        if residual is None:
            return rms_norm(x.flatten(0, -2), self.weight, self.eps).view(x.shape)  # heads are rows too
        return add_rms_norm(x, residual, self.weight, self.eps)


class FusedSiluAndMul(SiluAndMul):
    """Gate and product in one pass."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As `SiluAndMul`."""
        return silu_and_mul(gate_up)


class FusedLlamaAttention(LlamaAttention):
    """Rotation and the store into the cache in one pass, and QK-norm where the model has one."""

    def prepare(
        self, qkv: torch.Tensor, batch: ForwardBatch, stream: torch.Tensor | None = None, eps: float = 0.0
    ) -> torch.Tensor:
        """As `LlamaAttention`. With `stream` [T, H], `qkv` was computed from it without its norm (`qk_norm_rope_store`)."""
        query, key, value = self.split_heads(qkv)
        return qk_norm_rope_store(
            query, key, value, batch.positions, self.attn.kv_cache, batch.slot_mapping, self.preparation(), stream, eps
        )  # fmt: skip

    def preparation(self) -> Preparation:
        """What a kernel must know to do it."""
        return Preparation(self.rope.cos_sin_cache)


class FusedQwen3Attention(FusedLlamaAttention, Qwen3Attention):
    """With QK-norm."""

    def preparation(self) -> Preparation:
        """As `FusedLlamaAttention`."""
        return Preparation(self.rope.cos_sin_cache, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class FusedQwen2Attention(FusedLlamaAttention, Qwen2Attention):
    """As Llama's: the families differ in their biases alone."""


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    RMSNorm: FusedRMSNorm,
    SiluAndMul: FusedSiluAndMul,
    LlamaAttention: FusedLlamaAttention,
    Qwen2Attention: FusedQwen2Attention,
    Qwen3Attention: FusedQwen3Attention,
}


def fuse(model: nn.Module, twins: Mapping[type[nn.Module], type[nn.Module]] = FUSED) -> None:
    """Turn every layer that has a fused twin into it, in place: the weights stay where they are."""
    for module in model.modules():
        if (twin := twins.get(type(module))) is not None and _fits(module):
            module.__class__ = twin


def _fits(layer: nn.Module) -> bool:
    """Not attention whose head_dim is no power of two, as a tile of a kernel is; flash-attn's heads may be 80 wide."""
    return not isinstance(layer, LlamaAttention) or layer.head_dim & (layer.head_dim - 1) == 0
