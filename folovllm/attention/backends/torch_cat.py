"""Attention of one request at a time over a cache that grows by concatenation, the simplest cache."""

from __future__ import annotations

import torch

from folovllm.attention.backends.abstract import AttentionBackend, AttentionConfig, BackendUnavailable
from folovllm.attention.backends.sliding import SlidingCat
from folovllm.attention.growing_cache import GrowingKVCache
from folovllm.attention.ops import create_causal_mask, naive_attention
from folovllm.forward_batch import ForwardBatch


class TorchCatBackend(AttentionBackend):
    """The batch is one sequence; each layer's `kv_cache` is a `GrowingKVCache` and not a tensor.

    There are no slots: new tokens are appended, so `slot_mapping` and `block_tables` are not read.
    """

    name = "torch_cat"

    @classmethod
    def check_available(cls, config: AttentionConfig) -> None:
        """Raise `BackendUnavailable`: this backend cannot be chosen by name. `kv_cache="growing"` uses it."""
        raise BackendUnavailable(
            'attention_backend "torch_cat" comes with kv_cache="growing": leave it out, or take "m1"'
        )

    def store(  # type: ignore[override]  # a cache that grows cannot be one tensor
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: GrowingKVCache, slot_mapping: torch.Tensor
    ) -> None:
        """Append `key` and `value` [T, Hkv, D]."""
        kv_cache.append(key, value)

    def sliding(self, window: int) -> AttentionBackend:
        """Return the backend of a layer in which a token sees `window` tokens."""
        return SlidingCat(self, window)

    def forward(  # type: ignore[override]
        self, query: torch.Tensor, kv_cache: GrowingKVCache, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return causal attention of the new tokens [T, Hq, D] over all cached tokens, the new ones included."""
        mask = None if len(query) == 1 else create_causal_mask(len(query), len(kv_cache), query.device)  # [T, n]
        return naive_attention(query, kv_cache.key, kv_cache.value, self.config.scale, mask)
