"""The contract between the model and whatever computes attention (strategy pattern)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from folovllm.forward_batch import ForwardBatch
from folovllm.kv_format import FP8, UNSCALED, KVScales, encode

if TYPE_CHECKING:
    from folovllm.kernels.preparation import Preparation


class BackendUnavailable(ValueError):
    """A backend cannot run here; the message says what is missing and what to do."""


@dataclass(slots=True, frozen=True)
class AttentionConfig:
    """What a backend needs to know before any weight is loaded."""

    num_heads: int  # Hq on this rank
    num_kv_heads: int  # Hkv on this rank
    head_dim: int  # D
    dtype: torch.dtype
    device: torch.device
    block_size: int | None  # B; None: not chosen yet, any that the backend supports will do
    max_num_seqs: int
    long_prompts: bool = False  # M6: whether long prompts may go to a kernel of their own, where the device has one
    kv_dtype: torch.dtype | None = None  # of the cache; None: `dtype`

    @property
    def scale(self) -> float:
        """The factor on the scores, 1 / sqrt(D)."""
        return float(self.head_dim**-0.5)

    @property
    def is_fp8(self) -> bool:
        """Whether the cache keeps numbers of 8 bits."""
        return self.kv_dtype == FP8


class AttentionBackend(ABC):
    """Writes new K/V into the cache and attends over it; one instance serves all layers of a model.

    `forward` reads the cache only: a step stores first. A backend with `supports_cuda_graph` reads device tensors and
    the batch's upper bounds and never the `_host` lists; it calls neither `.item()` nor `.tolist()`.
    """

    name: ClassVar[str]
    supported_block_sizes: ClassVar[tuple[int, ...] | None] = None  # None: any; else multiples of one of these
    supports_cuda_graph: ClassVar[bool] = False
    supports_prompt_graph: bool = False  # whether it serves batches that are `is_padded`
    reads_fp8: ClassVar[bool] = False  # whether `forward` takes a cache in 8 bits as it is
    scales: KVScales = UNSCALED  # of such a cache

    def __init__(self, config: AttentionConfig) -> None:
        self.config = config

    @classmethod
    def check_available(cls, config: AttentionConfig) -> None:
        """Raise `BackendUnavailable` where this backend cannot run: device, dtype, head_dim, block size, package."""

    @classmethod
    def supports_block_size(cls, block_size: int) -> bool:
        """Whether blocks of `block_size` tokens work."""
        sizes = cls.supported_block_sizes
        return sizes is None or any(block_size % size == 0 for size in sizes)

    @classmethod
    def supports_graph(cls, device: torch.device) -> bool:
        """Whether a step can be captured on `device`. On CPU any can: there it is called again, not replayed."""
        return cls.supports_cuda_graph or device.type == "cpu"

    def of_layer(self, scales: KVScales, window: int | None = None) -> AttentionBackend:
        """Return the backend of a layer whose cache has `scales` and whose tokens see `window` tokens (None: all).

        It is this object, or a copy where the layer has a window or a cache in 8 bits. The original plans each step, once.
        So a plan must be kept in an object that the copies share.
        """
        backend = self if window is None else self.sliding(window)
        if not self.config.is_fp8:
            return backend
        backend = copy(backend)
        backend.scales = scales
        return backend

    def sliding(self, window: int) -> AttentionBackend:
        """Return the backend of a layer in which a token sees `window` tokens: itself and those right before it.

        Raises `BackendUnavailable` unless a backend overrides it; `SlidingBackend` is one for caches that plain torch reads.
        """
        raise BackendUnavailable(f'{self.name} knows no sliding window: choose "triton" or "torch_paged"')

    def as_bytes(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Encode new K/V for a cache in 8 bits. Returns them and the cache as bytes, which any operation can copy."""
        cached = encode(self.scales.centred(key), self.scales.key_factor), encode(value, self.scales.value_factor)
        return cached[0].view(torch.uint8), cached[1].view(torch.uint8), kv_cache.view(torch.uint8)

    def plan(self, batch: ForwardBatch) -> None:
        """Prepare once a step what all layers share. Device work only, so that it can be captured."""

    @abstractmethod
    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write `key` and `value` [T, Hkv, D] to their slots in `kv_cache` [2, N, B, Hkv, D]; slot -1 is skipped."""

    @abstractmethod
    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Causal attention of `query` [T, Hq, D] over each sequence's own cached K/V; returns [T, Hq, D]."""

    def forward_raw(
        self, qkv: torch.Tensor, preparation: Preparation, kv_cache: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor | None:
        """All between two projections of a batch of disjoint decodes in one kernel; None where a backend has no such kernel.

        [S, (Hq + 2 Hkv) D] -> [S, Hq, D]; the new K/V are stored on the way.
        """
        return None
