"""Attention in plain torch, one sequence after the other: slow and simple. Tests compare every other backend with it."""

from __future__ import annotations

import torch

from folovllm.attention.backends.abstract import AttentionBackend
from folovllm.attention.ops import create_causal_mask, naive_attention
from folovllm.step.forward_batch import ForwardBatch


class TorchNaiveBackend(AttentionBackend):
    """Gathers each sequence's K/V from its blocks, of any size, and computes textbook attention. One long block is a contiguous cache."""

    name = "torch_naive"
    supports_prompt_graph = True

    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
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
        from folovllm.attention.backends.sliding import SlidingBackend  # here, for few models have windows

        return SlidingBackend(self, window, gather_kv)


def reshape_and_cache_kv(
    key: torch.Tensor,  # [T, Hkv, D]
    value: torch.Tensor,  # [T, Hkv, D]
    kv_cache: torch.Tensor,  # [2, N, B, Hkv, D], any strides
    slot_mapping: torch.Tensor,  # [T] int64
) -> None:
    """Write token t's K/V to slot `slot_mapping[t]`, which is offset `slot % B` of block `slot // B`.

    Nothing else in the cache changes. Slot -1 means "nowhere": as an index it would overwrite the cache's last slot.
    """
    wanted = slot_mapping >= 0
    slot, block_size = slot_mapping[wanted], kv_cache.shape[2]
    block, offset = slot // block_size, slot % block_size
    kv_cache[0, block, offset] = key[wanted]
    kv_cache[1, block, offset] = value[wanted]


def gather_kv(
    kv_cache: torch.Tensor,  # [2, N, B, Hkv, D]
    block_table: torch.Tensor,  # [max_blocks] int
    seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy K and V of one sequence out of its blocks, in token order: two [seq_len, Hkv, D].

    Position p is at offset `p % B` of the table's block number `p // B`. Entries beyond the sequence are never read.
    """
    position = torch.arange(seq_len, device=kv_cache.device)
    block_size = kv_cache.shape[2]
    key, value = kv_cache[:, block_table[position // block_size], position % block_size]
    return key, value
