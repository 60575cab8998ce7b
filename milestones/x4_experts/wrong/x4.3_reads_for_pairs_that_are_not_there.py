"""Reads a row of x for every place of the tile: behind the last pair there is none to read."""


@triton.jit
def multiply_tile(
    x_ptr, matrix_ptr, token, inside, rows, N, K: tl.constexpr, GATED: tl.constexpr, TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    k = tl.arange(0, TILE_K)
    inputs = x_ptr + token[:, None] * K + k[None, :]
    weights = matrix_ptr + rows[None, :] * K + k[:, None]
    total = tl.zeros((token.shape[0], rows.shape[0]), tl.float32)
    total_up = tl.zeros((token.shape[0], rows.shape[0]), tl.float32)
    for start in range(0, K, TILE_K):
        there = k < K - start
        x = tl.load(inputs + start, mask=there[None, :], other=0.0)
        w = tl.load(weights + start, mask=there[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
        if GATED:
            up = tl.load(weights + N * K + start, mask=there[:, None], other=0.0)
            total_up = tl.dot(x, up, total_up, input_precision=PRECISION)
    return total, total_up
