"""Layers whose element-wise work is one Triton kernel instead of several torch operations: same names, same contracts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.kernels.activation import silu_and_mul
from folovllm.kernels.qk_norm_rope import qk_norm_rope_store
from folovllm.kernels.rms_norm import add_rms_norm, rms_norm
from folovllm.kernels.small_linear import serves, small_linear
from folovllm.layers.activation import SiluAndMul
from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear
from folovllm.models.llama import LlamaAttention, LlamaMLP
from folovllm.models.qwen2 import Qwen2Attention
from folovllm.models.qwen3 import Qwen3Attention
from folovllm.worker.input_batch import ForwardBatch


class FusedRMSNorm(RMSNorm):
    """Sum and norm in one pass over [T, H]."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As `RMSNorm`."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps)


class FusedSiluAndMul(SiluAndMul):
    """Gate and product in one pass."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As `SiluAndMul`."""
        return silu_and_mul(gate_up)


class FusedLlamaAttention(LlamaAttention):
    """Rotation and the store into the cache in one pass."""

    def prepare(self, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """As `LlamaAttention`."""
        query, key, value = self.split_heads(qkv)
        return qk_norm_rope_store(
            query, key, value, batch.positions, self.rope.cos_sin_cache, self.attn.kv_cache, batch.slot_mapping
        )


class FusedQwen3Attention(Qwen3Attention):
    """Norm of queries and keys, rotation, and the store into the cache in one pass."""

    def prepare(self, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """As `Qwen3Attention`."""
        query, key, value = self.split_heads(qkv)
        return qk_norm_rope_store(
            query, key, value, batch.positions, self.rope.cos_sin_cache, self.attn.kv_cache, batch.slot_mapping,
            self.q_norm.weight, self.k_norm.weight, self.q_norm.eps,
        )  # fmt: skip


class FusedQwen2Attention(Qwen2Attention):
    """As Llama's: the families differ in their biases alone."""

    prepare = FusedLlamaAttention.prepare


def _few(x: torch.Tensor) -> bool:
    """Whether `small_linear` should take this batch: not in the interpreter, where its many programs take minutes."""
    return x.is_cuda and serves(len(x))


class FusedLlamaMLP(LlamaMLP):
    """Gate, up and activation in one kernel where the batch is small."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `LlamaMLP`."""
        if _few(x) and self.gate_up_proj.bias is None:
            return self.down_proj(small_linear(x, self.gate_up_proj.weight, gated=True))
        return super().forward(x)


def _linear(self: LinearBase, x: torch.Tensor) -> torch.Tensor:
    """As `LinearBase`, by our own kernel where the batch is small."""
    if _few(x) and self.bias is None:
        return small_linear(x, self.weight)
    return F.linear(x, self.weight, self.bias)


class FusedQKVParallelLinear(QKVParallelLinear):
    """Few tokens: all bandwidth, no library."""

    forward = _linear


class FusedRowParallelLinear(RowParallelLinear):
    """Few tokens: all bandwidth, no library."""

    forward = _linear


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    RMSNorm: FusedRMSNorm,
    SiluAndMul: FusedSiluAndMul,
    QKVParallelLinear: FusedQKVParallelLinear,
    RowParallelLinear: FusedRowParallelLinear,
    LlamaMLP: FusedLlamaMLP,
    LlamaAttention: FusedLlamaAttention,
    Qwen2Attention: FusedQwen2Attention,
    Qwen3Attention: FusedQwen3Attention,
}


def fuse(model: nn.Module) -> None:
    """Turn every layer that has a fused twin into it, in place: the weights stay where they are."""
    for module in model.modules():
        if (twin := FUSED.get(type(module))) is not None:
            module.__class__ = twin
