"""First the largest of all chunks, then the sums, a chunk at a time."""

def merge_partials(
    max_ptr, sum_ptr, acc_ptr, first_row, num_chunks, stride, GROUP: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr
):
    g, d = tl.arange(0, GROUP), tl.arange(0, D)
    top = tl.full([GROUP], LOWEST, tl.float32)
    for c in range(0, num_chunks):
        top = tl.maximum(top, tl.load(max_ptr + first_row + c * stride + g, cache_modifier=".cg"))
    row_sum, acc = tl.zeros([GROUP], tl.float32), tl.zeros([GROUP, D], tl.float32)
    for c in range(0, num_chunks):
        row = first_row + c * stride + g
        weight = tl.exp2(tl.load(max_ptr + row, cache_modifier=".cg") - top)
        row_sum += weight * tl.load(sum_ptr + row, cache_modifier=".cg")
        place = row.to(tl.int64)[:, None] * D + d[None, :]
        acc += weight[:, None] * tl.load(acc_ptr + place, cache_modifier=".cg")
    return row_sum, acc
