"""Attention over a paged cache in plain torch: it copies a sequence's blocks together, then calls PyTorch's kernel."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from folovllm.attention.backends.torch_naive import TorchNaiveBackend
from folovllm.attention.ops import create_causal_mask
from folovllm.step.forward_batch import ForwardBatch


class TorchPagedBackend(TorchNaiveBackend):
    """Stores as its base. Each step copies all blocks that it reads, which the kernels of M4 avoid."""

    name = "torch_paged"

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        queries = torch.split(query, batch.query_lens_host)  # S times [n, Hq, D]
        outputs = [
            attend(new, *gather_blocks(kv_cache, table, seq_len), self.config.scale)
            for new, table, seq_len in zip(queries, batch.block_tables, batch.seq_lens_host, strict=True)
        ]
        return torch.cat(outputs)


def gather_blocks(
    kv_cache: torch.Tensor,  # [2, N, B, Hkv, D]
    block_table: torch.Tensor,  # [max_blocks] int32
    seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one sequence in token order: two [seq_len, Hkv, D].

    The sequence's first ceil(seq_len / B) blocks, in the order of its block table, one behind the other; the places of
    the last block that hold no token of it are cut off. Entries of the table beyond those blocks mean nothing.

    K and V are each copied once: an index that gathers blocks copies already, so what it gives must have its blocks and
    places side by side. `kv_cache[:, blocks]` keeps the order of memory, heads before places, and merging blocks and
    places would copy again.
    """
    block_size = kv_cache.shape[2]
    blocks = block_table[: -(-seq_len // block_size)]
    key, value = (part.index_select(0, blocks).flatten(0, 1)[:seq_len] for part in kv_cache)  # from [blocks, B, Hkv, D]
    return key, value


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Return causal attention of the last tokens of a sequence, [n, Hq, D], over its K and V, [seq_len, Hkv, D] each."""
    whole = len(query) == len(key)  # then `is_causal` is enough, and PyTorch skips what the mask would hide
    mask = None if whole or len(query) == 1 else create_causal_mask(len(query), len(key), query.device)
    output = scaled_dot_product_attention(
        query.transpose(0, 1)[None],  # [1, Hq, n, D]
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=whole,
        scale=scale,
        enable_gqa=True,
    )
    return output[0].transpose(0, 1)  # [n, Hq, D]
