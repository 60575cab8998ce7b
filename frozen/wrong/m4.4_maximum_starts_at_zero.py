"""The running maximum starts at 0. Input: scores of about -200, whose weights all become 0."""

def decode_split(
    q, k_ptr, v_ptr, table_ptr, first, last, scale, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr,
    B: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):
    row_max, row_sum = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    dims = tl.arange(0, D)[None, :]
    for token in range(first, last, TILE):
        ids = block_ids(table_ptr, token, last, B, TILE)
        at = tile_offsets(ids, token, B, TILE, STRIDE_BLOCK, STRIDE_TOKEN)[:, None] + dims
        inside = token + tl.arange(0, TILE) < last
        k = tl.load(k_ptr + at, mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + at, mask=inside[:, None], other=0.0)
        row_max, row_sum, acc = online_softmax_tile(q, k, v, inside[None, :], row_max, row_sum, acc, scale)
    return row_max, row_sum, acc
