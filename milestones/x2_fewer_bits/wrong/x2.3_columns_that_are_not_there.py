"""Reads columns without a mask: where a row's quads are no power of two, those behind the end do not exist."""


@triton.jit
def multiply_chunk(
    words, x_ptr, columns_ptr, stride_x, inside, squares, exponent, GROUP: tl.constexpr, NORM: tl.constexpr
):
    LINES: tl.constexpr = words.shape[0]
    sums, x_sums = zeros(len(squares), LINES, words.shape[1], 4), zeros(len(squares), 1, words.shape[1], 4)
    for i in tl.static_range(8):
        step = i * (GROUP // 8)
        xs = load_tokens(x_ptr + step, stride_x, inside, len(squares))
        if NORM:
            squares = add_squares(squares, xs, tl.float32)
        if columns_ptr is not None:
            xs = times(xs, tl.load(columns_ptr + step).to(tl.float32))
        sums = add_products(sums, code(words, i, exponent), xs, tl.float32)
        x_sums = add_all(x_sums, xs)
    return sums, x_sums, squares
