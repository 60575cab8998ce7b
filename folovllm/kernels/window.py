"""What the attention kernels do for a layer with a sliding window: a token sees WINDOW tokens, itself and those before it.

Tiles that nobody sees are never visited. What is left of a window is tiles at its edge, which not all queries see whole:
`window_edge`, and after them those that the kernels' own loops take as ever.
"""

from __future__ import annotations

import triton
import triton.language as tl

from folovllm.kernels.online_softmax import block_ids, online_softmax_tile, tile_offsets


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The first token of the tile in which the window of the token at `position` begins."""
    return tl.maximum(position - WINDOW + 1, 0) // TILE * TILE


@triton.jit
def window_edge(
    q, row_max, row_sum, acc, k_ptr, v_ptr, table_ptr, positions, first, edge, last, scale,
    WINDOW: tl.constexpr, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr,
    B: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Fold the tiles from `first` to `edge` into the state of queries `q` [M, D] that stand at `positions` [M], rising.

    Both are multiples of TILE. Nothing is read at or past `last`, or that no query sees: such blocks may be others' by
    now. A cache in 8 bits is read as `prefill_loop_fp8` does. Returns (row_max, row_sum, acc), as `online_softmax_tile`.
    """
    if k_ptr.dtype.element_ty == tl.float8e4nv:
        q = q if q.dtype == tl.float32 else tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    dims = tl.arange(0, D)
    lowest = tl.min(positions, 0) - WINDOW + 1
    for token in range(first, edge, TILE):
        keys = token + tl.arange(0, TILE)
        blocks = block_ids(table_ptr, token, last, B, TILE)
        offsets = tile_offsets(blocks, token, B, TILE, STRIDE_BLOCK, STRIDE_TOKEN)[:, None] + dims[None, :]  # [TILE, D]
        alive = (keys >= lowest) & (keys < last)
        k = tl.load(k_ptr + offsets, mask=alive[:, None], other=0.0).to(q.dtype)
        v = tl.load(v_ptr + offsets, mask=alive[:, None], other=0.0).to(q.dtype)
        distance = positions[:, None] - keys[None, :]
        visible = (distance >= 0) & (distance < WINDOW) & alive[None, :]
        row_max, row_sum, acc = online_softmax_tile(q, k, v, visible, row_max, row_sum, acc, scale)
    return row_max, row_sum, acc
