"""Shared parts of the kernels for mixture of experts: the expert of a tile, and the gated activation of its results.

Pairs (token, expert) are sorted by expert. So the pairs of an expert are neighbours, and its tiles follow one another.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tile(starts_ptr, tile, E: tl.constexpr, WIDTH: tl.constexpr, TILE_M: tl.constexpr):
    """Find out whose tile this is. Tiles of expert 0 come first, then those of expert 1: as many of each as its pairs fill.

    Args:
        starts_ptr: [E + 1], int64. The pairs of expert e are at the places starts[e] to starts[e + 1] - 1 of the sorted order.
        tile: the number of the tile, of TILE_M places each. The last tile of an expert may be filled in part.
        WIDTH: a power of two, E or more.

    Returns:
        The expert, E where there is no such tile; the tile's first place; and the end of the expert's places, up to which the
        tile may read. Of a tile that there is not, the last two mean nothing.
    """
    e = tl.arange(0, WIDTH)
    first = tl.load(starts_ptr + e, mask=e < E, other=0)
    end = tl.load(starts_ptr + e + 1, mask=e < E, other=0)
    tiles = tl.cdiv(end - first, TILE_M)
    last = tl.cumsum(tiles, 0)  # tiles up to and with each expert's
    expert = tl.minimum(tl.sum((last <= tile).to(tl.int32), 0), E)
    mine = e == expert
    begin = tl.sum(tl.where(mine, first + (tile - (last - tiles)) * TILE_M, 0), 0)
    return expert, begin, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def finish_tile(total, total_up, DTYPE: tl.constexpr, GATED: tl.constexpr):
    """Round sums in float32 to outputs. GATED: return silu(gate) * up, with both rounded before the product."""
    result = total.to(DTYPE)
    if GATED:
        gate = result.to(tl.float32)
        result = (gate / (1.0 + tl.exp(-gate))).to(DTYPE) * total_up.to(DTYPE)
    return result
