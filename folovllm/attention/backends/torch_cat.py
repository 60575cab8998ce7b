"""Attention over a cache that grows by concatenation: M1's "torch_naive" (from M2 on that is `TorchNaiveBackend`)."""

from __future__ import annotations

import torch

from folovllm.attention.backends.abstract import AttentionBackend
from folovllm.attention.ops import append_kv, create_causal_mask, naive_attention
from folovllm.step.forward_batch import ForwardBatch


class GrowingKVCache:
    """K and V of one sequence in token order, `[n, Hkv, D]` each. Simple and quadratic: every append copies all cached tokens."""

    _kv = torch.empty(2, 0, 0, 0)  # [2, n, Hkv, D]; this empty one is what all caches share until they append

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Append the K/V of new tokens, [T, Hkv, D] each."""
        cached = self._kv if len(self) else key.new_empty(2, 0, *key.shape[1:])
        self._kv = append_kv(cached, key, value)

    def reset(self) -> None:
        """Empty the cache for another sequence."""
        self._kv = GrowingKVCache._kv

    @property
    def key(self) -> torch.Tensor:
        """K of all cached tokens, [n, Hkv, D]."""
        return self._kv[0]

    @property
    def value(self) -> torch.Tensor:
        """V of all cached tokens, [n, Hkv, D]."""
        return self._kv[1]

    def __len__(self) -> int:
        return self._kv.shape[1]


class TorchCatBackend(AttentionBackend):
    """The batch is one sequence; each layer's `kv_cache` is a `GrowingKVCache`. There are no slots: new tokens are appended."""

    name = "torch_cat"

    def store(  # type: ignore[override]  # a cache that grows cannot be one tensor
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: GrowingKVCache, slot_mapping: torch.Tensor
    ) -> None:
        """Append `key` and `value` [T, Hkv, D]."""
        kv_cache.append(key, value)

    def sliding(self, window: int) -> AttentionBackend:
        from folovllm.attention.backends.sliding import SlidingCat  # here, for few models have windows

        return SlidingCat(self, window)

    def forward(  # type: ignore[override]
        self, query: torch.Tensor, kv_cache: GrowingKVCache, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return causal attention of the new tokens [T, Hq, D] over all cached tokens, the new ones included."""
        mask = None if len(query) == 1 else create_causal_mask(len(query), len(kv_cache), query.device)  # [T, n]
        return naive_attention(query, kv_cache.key, kv_cache.value, self.config.scale, mask)
