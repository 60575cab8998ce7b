"""The layers of a decode on a CPU: what lies between its products is one kernel instead of a dozen small operations."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from folovllm.forward_batch import ForwardBatch
from folovllm.kernels.cpu.ops import CpuKernels
from folovllm.kernels.preparation import Preparation
from folovllm.layers.embed_head import ParallelLMHead
from folovllm.layers.formats.cpu import CpuPlain
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.layernorm import RMSNorm
from folovllm.models.llama import LlamaAttention
from folovllm.models.qwen2 import Qwen2Attention
from folovllm.models.qwen3 import Qwen3Attention


class CpuRMSNorm(RMSNorm):
    """Adds and norms in one pass."""

    def __init__(self, size: int, eps: float = 1e-6, *, kernels: CpuKernels) -> None:
        super().__init__(size, eps)
        self._kernels = kernels

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As `RMSNorm`."""
        normed, total = self._kernels.rms_norm(x.contiguous(), residual, self.weight, self.eps)
        return normed if residual is None else (normed, total)


class CpuLlamaAttention(LlamaAttention):
    """Rotates and stores into the cache in one pass, with QK-norm where the model has one."""

    def __init__(self, *args: Any, kernels: CpuKernels, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kernels = kernels

    def prepare(self, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """As `LlamaAttention`. A cache in 8 bits, and norms whose weights are of another dtype, are torch's."""
        needed, cache = self.preparation(), self.attn.kv_cache
        if {cache.dtype} | {w.dtype for w in (needed.q_weight, needed.k_weight) if w is not None} != {qkv.dtype}:
            return super().prepare(qkv, batch)
        return self._kernels.prepare(qkv, needed, batch.positions, batch.slot_mapping, cache)

    def preparation(self) -> Preparation:
        """Return what the kernel needs besides `qkv`."""
        return Preparation(self.rope.cos_sin_cache)


class CpuQwen2Attention(CpuLlamaAttention, Qwen2Attention):
    """The same as Llama's: the families differ in their biases alone."""


class CpuQwen3Attention(CpuLlamaAttention, Qwen3Attention):
    """With QK-norm."""

    def preparation(self) -> Preparation:
        """As `CpuLlamaAttention`."""
        return Preparation(self.rope.cos_sin_cache, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class CpuHead(ParallelLMHead):
    """The largest product of a step, by the kernel for few rows."""

    def __init__(self, vocab_size: int, hidden_size: int, *, kernels: CpuKernels) -> None:
        super().__init__(vocab_size, hidden_size)
        self._kernels = kernels

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """As `ParallelLMHead`."""
        if self._kernels.multiplies(hidden, self.weight):
            return self._kernels.linear(hidden, self.weight, out=out)
        return super().forward(hidden, out)


PLACES = {
    RMSNorm: CpuRMSNorm,
    LlamaAttention: CpuLlamaAttention,
    Qwen2Attention: CpuQwen2Attention,
    Qwen3Attention: CpuQwen3Attention,
    ParallelLMHead: CpuHead,
}


def cpu_layers(kernels: CpuKernels) -> LayerSet:
    """Return the set in which every layer with a kernel for a CPU uses it."""
    return LayerSet({kind: partial(own, kernels=kernels) for kind, own in PLACES.items()}, CpuPlain(kernels))
