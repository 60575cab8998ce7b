"""Blocks between the cache and a buffer. A block is 2L pieces, K and V of each layer, far apart in the cache; in the buffer they are one line.

One launch moves them all, so that the link to the host sees one large copy and not 2L small ones.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

WORDS = 2048  # of 4 bytes that a program moves


@triton.jit
def move_pieces_kernel(cache, buffer, block_ids, piece_stride, num_words, WORDS: tl.constexpr, TO_CACHE: tl.constexpr):
    """Copy part of piece j of block `block_ids[i]`: the cache is [2L, N, words], the buffer [k, 2L, words]. Grid (k, 2L, parts)."""
    i, j = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    block = tl.load(block_ids + i).to(tl.int64)
    in_cache = cache + j.to(tl.int64) * piece_stride + block * num_words + at
    in_buffer = buffer + (i.to(tl.int64) * tl.num_programs(1) + j) * num_words + at
    if TO_CACHE:
        tl.store(in_cache, tl.load(in_buffer, mask=at < num_words), mask=at < num_words)
    else:
        tl.store(in_buffer, tl.load(in_cache, mask=at < num_words), mask=at < num_words)


def move_pieces(cache: torch.Tensor, buffer: torch.Tensor, block_ids: torch.Tensor, *, to_cache: bool) -> None:
    """Move `buffer` [k, 2L, words] int32 to or from the blocks `block_ids` [k] int32 of `cache` [2L, N, words] int32, on the current stream."""
    count, pieces, words = buffer.shape
    grid: Any = (count, pieces, triton.cdiv(words, WORDS))
    move_pieces_kernel[grid](cache, buffer, block_ids, cache.stride(0), words, WORDS=WORDS, TO_CACHE=to_cache)
