"""Attention through a sliding window (Mistral 7B; Jiang et al., 2023), in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from folovllm.attention.backends.abstract import AttentionBackend
from folovllm.attention.ops import create_causal_mask, naive_attention
from folovllm.step.forward_batch import ForwardBatch

Gather = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def attend_window(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """Return attention of the last tokens of a sequence, [n, Hq, D], each over itself and the `window - 1` tokens before it.

    Args:
        key: [m, Hkv, D], like `value`: the sequence's last m tokens, n <= m. They include all tokens in the windows.
    """
    new, total = len(query), len(key)
    mask = create_causal_mask(new, total, query.device).triu(total - new - window + 1)  # [n, m]
    return naive_attention(query, key, value, scale, mask)


class SlidingBackend(AttentionBackend):
    """Replaces a backend in plain torch in a layer with a window. The replaced backend plans and stores."""

    supports_prompt_graph = True

    def __init__(self, inner: AttentionBackend, window: int, gather: Gather | None = None) -> None:
        """`gather` copies K and V of one sequence out of its blocks."""
        super().__init__(inner.config)
        self._inner, self._window, self._gather = inner, window, gather

    def plan(self, batch: ForwardBatch) -> None:
        self._inner.plan(batch)

    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        self._inner.store(key, value, kv_cache, slot_mapping)

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return attention, sequence by sequence: [T, Hq, D] -> [T, Hq, D].

        Blocks that no new token sees are not read, because they may belong to other sequences by now.
        """
        assert self._gather is not None
        outputs, block_size = [], kv_cache.shape[2]
        queries = torch.split(query, batch.query_lens_host)
        for new, table, seq_len in zip(queries, batch.block_tables, batch.seq_lens_host, strict=True):
            first = max(0, seq_len - len(new) + 1 - self._window) // block_size  # block that a new token sees
            key, value = self._gather(kv_cache, table[first:], seq_len - first * block_size)
            outputs.append(attend_window(new, key, value, self.config.scale, self._window))
        return torch.cat(outputs)


class SlidingCat(SlidingBackend):
    """`SlidingBackend` over the growing cache of one sequence."""

    def forward(self, query: torch.Tensor, kv_cache: Any, batch: ForwardBatch) -> torch.Tensor:
        return attend_window(query, kv_cache.key, kv_cache.value, self.config.scale, self._window)
