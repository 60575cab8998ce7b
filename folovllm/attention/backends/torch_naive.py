"""Attention in plain torch, one sequence after the other: slow and simple. Tests compare every other backend with it."""

from __future__ import annotations

import torch

from folovllm.attention.backends.abstract import AttentionBackend
from folovllm.attention.backends.sliding import SlidingBackend
from folovllm.attention.ops import create_causal_mask, gather_kv, naive_attention, reshape_and_cache_kv
from folovllm.step.forward_batch import ForwardBatch


class TorchNaiveBackend(AttentionBackend):
    """Gathers each sequence's K/V from its blocks, then computes textbook attention. Any block size.

    With one block per sequence, as long as the context, this is a contiguous cache.
    """

    name = "torch_naive"
    supports_prompt_graph = True

    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write `key` and `value` [T, Hkv, D] to their slots; slot -1 is skipped."""
        reshape_and_cache_kv(key, value, kv_cache, slot_mapping)

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return causal attention, sequence by sequence: [T, Hq, D] -> [T, Hq, D]."""
        queries = torch.split(query, batch.query_lens_host)  # S times [n, Hq, D]
        outputs = []
        for new, table, seq_len in zip(queries, batch.block_tables, batch.seq_lens_host, strict=True):
            key, value = gather_kv(kv_cache, table, seq_len)
            mask = None if len(new) == 1 else create_causal_mask(len(new), seq_len, query.device)
            outputs.append(naive_attention(new, key, value, self.config.scale, mask))
        return torch.cat(outputs)

    def sliding(self, window: int) -> AttentionBackend:
        """Return the backend of a layer in which a token sees `window` tokens."""
        return SlidingBackend(self, window)
