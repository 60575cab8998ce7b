"""The interface of attention backends (strategy pattern)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.kv_format import FP8, UNSCALED, KVScales

if TYPE_CHECKING:
    from folovllm.kernels.qk_norm_rope import Preparation


class BackendUnavailable(ValueError):
    """A backend cannot run here; the message says what is missing and what to do."""


@dataclass(slots=True, frozen=True)
class AttentionConfig:
    """The parameters of a backend, known before any weight is loaded."""

    num_heads: int  # Hq on this rank
    num_kv_heads: int  # Hkv on this rank
    head_dim: int  # D
    dtype: torch.dtype
    device: torch.device
    block_size: int | None  # M2: B; None: not chosen yet
    max_num_seqs: int
    long_prompts: bool = False  # M6: whether long prompts may go to a kernel variant, if the device has one
    kv_dtype: torch.dtype | None = None  # X2: of the cache; None: `dtype`

    @property
    def scale(self) -> float:
        """The factor on the scores, 1 / sqrt(D)."""
        return float(self.head_dim**-0.5)

    @property
    def is_fp8(self) -> bool:
        """Whether the KV cache is FP8."""
        return self.kv_dtype == FP8


class AttentionBackend(ABC):
    """Writes new K/V to the cache and computes attention over it. One instance serves all layers of a model.

    `forward` reads K/V only from the cache, so a step stores first; M1 needs these two methods alone. A backend with
    `supports_cuda_graph` reads device tensors and the batch's upper bounds, never the `_host` lists, and waits for no tensor (`.item()`).
    """

    name: ClassVar[str]
    supported_block_sizes: ClassVar[tuple[int, ...] | None] = None  # M2; None: any; else multiples of one of these
    supports_cuda_graph: ClassVar[bool] = False  # M6
    supports_prompt_graph: bool = False  # M6: whether it serves batches that are `is_padded`
    reads_fp8: ClassVar[bool] = False  # X2: whether `forward` reads an FP8 cache
    scales: KVScales = UNSCALED  # X2: of an FP8 cache

    def __init__(self, config: AttentionConfig) -> None:
        self.config = config

    @abstractmethod
    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write `key` and `value` [T, Hkv, D] to their slots in `kv_cache` [2, N, B, Hkv, D]; slot -1 is skipped."""

    @abstractmethod
    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return causal attention of `query` [T, Hq, D] over each sequence's own cached K/V, [T, Hq, D]."""

    @classmethod
    def check_available(cls, config: AttentionConfig) -> None:
        """Raise `BackendUnavailable` if this backend cannot run: device, dtype, head_dim, block size, package."""

    @classmethod
    def supports_block_size(cls, block_size: int) -> bool:
        """M2: return whether the backend supports blocks of `block_size` tokens: multiples of a supported size."""
        sizes = cls.supported_block_sizes
        return sizes is None or any(block_size % size == 0 for size in sizes)

    @classmethod
    def supports_graph(cls, device: torch.device) -> bool:
        """M6: return whether a step can be captured on `device`. On a CPU any can, since a replay calls its code again."""
        return cls.supports_cuda_graph or device.type == "cpu"

    def of_layer(self, scales: KVScales, window: int | None = None) -> AttentionBackend:
        """Return the backend of a layer whose cache has `scales` and whose tokens see `window` tokens (None: all).

        It is this object, or a copy that shares its plan if the layer has a window or (X2) an FP8 cache.
        """
        backend = self if window is None else self.sliding(window)
        if not self.config.is_fp8:
            return backend
        backend = copy(backend)
        backend.scales = scales
        return backend

    def sliding(self, window: int) -> AttentionBackend:
        """Return the backend of a layer in which a token sees `window` tokens: itself and those right before it."""
        raise BackendUnavailable(f'{self.name} knows no sliding window: choose "triton" or "torch_paged"')

    def plan(self, batch: ForwardBatch) -> None:
        """M4: prepare once a step the data that all layers share. Device work only, so that it can be captured."""

    def forward_raw(
        self, qkv: torch.Tensor, preparation: Preparation, kv_cache: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor | None:
        """M6: QK-norm, RoPE, store and attention of disjoint decodes in one kernel, [S, (Hq + 2 Hkv) D] -> [S, Hq, D]; None without one."""
        return None
