"""Attention with a sliding window: a token sees WINDOW tokens, itself and those right before it.

Tiles that no query sees are never read. In other tiles a mask says which keys a query sees.
"""

from __future__ import annotations

import triton
import triton.language as tl

from folovllm.kernels.online_softmax import LOWEST, block_ids, online_softmax_tile, tile_offsets


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Return the first token of the tile in which the window of the token at `position` begins."""
    return tl.maximum(position - WINDOW + 1, 0) // TILE * TILE


@triton.jit
def window_loop(
    q, k_ptr, v_ptr, table_ptr, positions, first, last, scale, WINDOW: tl.constexpr,
    STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute attention of `q` [M, D] at ascending `positions` [M] over the keys `first` to `last` of one KV head.

    The arguments are those of `decode_split`. Keys that no query sees are not read, because their blocks may belong to other
    sequences by now. An FP8 cache is cast as in `prefill_loop_fp8`. Returns row_max [M], row_sum [M], acc [M, D].
    """
    if k_ptr.dtype.element_ty == tl.float8e4nv:
        q = q if q.dtype == tl.float32 else tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    row_max = tl.full([M], LOWEST, tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    dims, lowest = tl.arange(0, D), tl.min(positions, 0) - WINDOW + 1
    blocks = block_ids(table_ptr, first, last, B, TILE)
    for token in range(first, last, TILE):
        offsets = tile_offsets(blocks, token, B, TILE, STRIDE_BLOCK, STRIDE_TOKEN)[:, None] + dims[None, :]  # [TILE, D]
        blocks = block_ids(table_ptr, token + TILE, last, B, TILE)  # a tile ahead, as in `decode_split`
        keys = token + tl.arange(0, TILE)
        alive = (keys >= lowest) & (keys < last)
        k = tl.load(k_ptr + offsets, mask=alive[:, None], other=0.0).to(q.dtype)
        v = tl.load(v_ptr + offsets, mask=alive[:, None], other=0.0).to(q.dtype)
        distance = positions[:, None] - keys[None, :]
        visible = (distance >= 0) & (distance < WINDOW) & alive[None, :]
        row_max, row_sum, acc = online_softmax_tile(q, k, v, visible, row_max, row_sum, acc, scale)
    return row_max, row_sum, acc
