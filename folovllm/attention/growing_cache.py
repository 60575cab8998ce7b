"""The KV cache of one layer and one sequence, grown by `torch.cat`."""

from __future__ import annotations

import torch

from folovllm.attention.ops import append_kv


class GrowingKVCache:
    """K and V of one sequence in token order, `[n, Hkv, D]` each; empty until the first `append`.

    It is simple, and its cost is quadratic: every append copies all cached tokens, and frees the shorter tensor.
    """

    def __init__(self) -> None:
        self._kv: torch.Tensor | None = None  # [2, n, Hkv, D]

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Append the K/V of new tokens, [T, Hkv, D] each."""
        cached = key.new_empty(2, 0, *key.shape[1:]) if self._kv is None else self._kv
        self._kv = append_kv(cached, key, value)

    def reset(self) -> None:
        """Empty the cache for another sequence."""
        self._kv = None

    @property
    def key(self) -> torch.Tensor:
        """K of all cached tokens, [n, Hkv, D]."""
        return self._cached()[0]

    @property
    def value(self) -> torch.Tensor:
        """V of all cached tokens, [n, Hkv, D]."""
        return self._cached()[1]

    def __len__(self) -> int:
        return 0 if self._kv is None else self._kv.shape[1]

    def _cached(self) -> torch.Tensor:
        if self._kv is None:
            raise RuntimeError("the cache is empty: append first")
        return self._kv
