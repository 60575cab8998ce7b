"""Attention whose element-wise work is one Triton kernel, and the set of all fused layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from folovllm.forward_batch import ForwardBatch
from folovllm.kernels.preparation import Preparation
from folovllm.kernels.qk_norm_rope import qk_norm_rope_store
from folovllm.layers.activation import GeluAndMul, SiluAndMul
from folovllm.layers.fused import FusedGeluAndMul, FusedRMSNorm, FusedSiluAndMul
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.layernorm import RMSNorm
from folovllm.models.gemma3 import Gemma3RMSNorm
from folovllm.models.llama import LlamaAttention
from folovllm.models.qwen2 import Qwen2Attention
from folovllm.models.qwen3 import Qwen3Attention


class FusedLlamaAttention(LlamaAttention):
    """Rotates and stores into the cache in one pass, with QK-norm where the model has one."""

    def prepare(
        self, qkv: torch.Tensor, batch: ForwardBatch, stream: torch.Tensor | None = None, eps: float = 0.0
    ) -> torch.Tensor:
        """As `LlamaAttention`. With `stream` [T, H], `qkv` was computed from it without its norm (`qk_norm_rope_store`)."""
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
