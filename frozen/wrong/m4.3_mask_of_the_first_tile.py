"""Masks every tile as if it were the first one. Input: MASKED, first 0, last 2 * TILE, positions in the first tile."""

def prefill_loop(
    q, row_max, row_sum, acc, k_ptr, v_ptr, table_ptr, positions, first, last, scale,
    MASKED: tl.constexpr, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr,
    B: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):
    dims = tl.arange(0, D)[None, :]
    tokens = first + tl.arange(0, TILE)
    ids = block_ids(table_ptr, first, last, B, TILE)
    for token in range(first, last, TILE):
        following = block_ids(table_ptr, token + TILE, last, B, TILE)
        at = tile_offsets(ids, token, B, TILE, STRIDE_BLOCK, STRIDE_TOKEN)[:, None] + dims
        if MASKED:
            inside = (token + tl.arange(0, TILE) < last)[:, None]
            k = tl.load(k_ptr + at, mask=inside, other=0.0)
            v = tl.load(v_ptr + at, mask=inside, other=0.0)
            visible = tokens[None, :] <= positions[:, None]
            row_max, row_sum, acc = online_softmax_tile(q, k, v, visible, row_max, row_sum, acc, scale)
        else:
            k, v = tl.load(k_ptr + at), tl.load(v_ptr + at)
            row_max, row_sum, acc = online_softmax_tile(q, k, v, True, row_max, row_sum, acc, scale)
        ids = following
    return row_max, row_sum, acc
