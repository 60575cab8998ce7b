"""Begins in the queries' type. The interpreter widens it by itself; on a GPU a loop may not change a type, so nothing compiles, and with a cast half precision is too small."""


def decode_split(
    q, k_ptr, v_ptr, table_ptr, first, last, scale, STRIDE_BLOCK, STRIDE_TOKEN, B, TILE, M, D,
):
    row_max = tl.full([M], LOWEST, q.dtype)
    row_sum = tl.zeros([M], q.dtype)
    acc = tl.zeros([M, D], q.dtype)
    dims = tl.arange(0, D)
    blocks = block_ids(table_ptr, first, last, B, TILE)
    for token in range(first, last, TILE):
        offsets = tile_offsets(blocks, token, B, TILE, STRIDE_BLOCK, STRIDE_TOKEN)[:, None] + dims[None, :]
        blocks = block_ids(table_ptr, token + TILE, last, B, TILE)
        inside = token + tl.arange(0, TILE) < last
        k = tl.load(k_ptr + offsets, mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + offsets, mask=inside[:, None], other=0.0)
        row_max, row_sum, acc = online_softmax_tile(q, k, v, inside[None, :], row_max, row_sum, acc, scale)
    return row_max, row_sum, acc
