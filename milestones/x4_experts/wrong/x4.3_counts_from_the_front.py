"""Takes the tile's number among all tiles for its number among the expert's: only expert 0 begins where it should."""


@triton.jit
def find_tile(starts_ptr, tile, E: tl.constexpr, WIDTH: tl.constexpr, TILE_M: tl.constexpr):
    e = tl.arange(0, WIDTH)
    first = tl.load(starts_ptr + e, mask=e < E, other=0)
    end = tl.load(starts_ptr + e + 1, mask=e < E, other=0)
    last = tl.cumsum(tl.cdiv(end - first, TILE_M), 0)
    expert = tl.minimum(tl.sum((last <= tile).to(tl.int32), 0), E)
    mine = e == expert
    begin = tl.sum(tl.where(mine, first + tile * TILE_M, 0), 0)
    return expert, begin, tl.sum(tl.where(mine, end, 0), 0)
