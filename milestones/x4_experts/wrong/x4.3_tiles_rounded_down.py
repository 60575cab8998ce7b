"""Gives an expert only the tiles that its pairs fill: the pairs that are left over get no answer."""


@triton.jit
def find_tile(starts_ptr, tile, E: tl.constexpr, WIDTH: tl.constexpr, TILE_M: tl.constexpr):
    e = tl.arange(0, WIDTH)
    first = tl.load(starts_ptr + e, mask=e < E, other=0)
    end = tl.load(starts_ptr + e + 1, mask=e < E, other=0)
    tiles = (end - first) // TILE_M
    last = tl.cumsum(tiles, 0)
    expert = tl.minimum(tl.sum((last <= tile).to(tl.int32), 0), E)
    mine = e == expert
    begin = tl.sum(tl.where(mine, first + (tile - (last - tiles)) * TILE_M, 0), 0)
    return expert, begin, tl.sum(tl.where(mine, end, 0), 0)
