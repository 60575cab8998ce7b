"""The largest maximum is that of all heads together: a head far below it weighs nothing. Input: maxima 0 and -300 of two heads."""

def merge_partials(
    max_ptr, sum_ptr, acc_ptr, first_row, num_chunks, stride, GROUP: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr
):
    g, d = tl.arange(0, GROUP), tl.arange(0, D)
    largest = tl.full([GROUP], LOWEST, tl.float32)
    row_sum, acc = tl.zeros([GROUP], tl.float32), tl.zeros([GROUP, D], tl.float32)
    for c in range(0, num_chunks):
        rows = first_row + c * stride + g
        row_max = tl.load(max_ptr + rows, cache_modifier=".cg")
        new = tl.maximum(largest, tl.max(row_max, 0))
        old, weight = tl.exp2(largest - new), tl.exp2(row_max - new)
        row_sum = row_sum * old + weight * tl.load(sum_ptr + rows, cache_modifier=".cg")
        part = tl.load(acc_ptr + rows[:, None].to(tl.int64) * D + d[None, :], cache_modifier=".cg")
        acc = acc * old[:, None] + weight[:, None] * part
        largest = new
    return row_sum, acc
