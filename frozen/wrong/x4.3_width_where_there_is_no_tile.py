"""Gives WIDTH, not E, where there is no such tile. Input: three experts, so WIDTH 4, and a tile behind the last."""

def find_tile(starts_ptr, tile, E: tl.constexpr, WIDTH: tl.constexpr, TILE_M: tl.constexpr):
    e = tl.arange(0, WIDTH)
    begin = tl.load(starts_ptr + e, mask=e < E, other=0)
    end = tl.load(starts_ptr + e + 1, mask=e < E, other=0)
    tiles = (end - begin + TILE_M - 1) // TILE_M
    behind = tl.cumsum(tiles, 0)
    expert = tl.sum((behind <= tile).to(tl.int32), 0)
    mine = e == expert
    first = tl.sum(tl.where(mine, begin + (tile - behind + tiles) * TILE_M, 0), 0)
    return expert, first, tl.sum(tl.where(mine, end, 0), 0)
