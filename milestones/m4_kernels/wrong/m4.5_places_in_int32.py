"""Leaves the rows of acc in int32: times D they overflow in a buffer of 2 ** 31 numbers."""


def merge_partials(max_ptr, sum_ptr, acc_ptr, first_row, num_chunks, stride, GROUP: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr):
    g, dims = tl.arange(0, GROUP), tl.arange(0, D)
    row_max = tl.full([GROUP], LOWEST, tl.float32)
    row_sum = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, D], tl.float32)
    for c0 in range(0, num_chunks, STEP):
        c = c0 + tl.arange(0, STEP)
        rows = first_row + c[:, None] * stride + g[None, :]  # [STEP, GROUP]
        real = (c < num_chunks)[:, None]
        part_max = tl.load(max_ptr + rows, mask=real, other=LOWEST, cache_modifier=".cg")
        part_sum = tl.load(sum_ptr + rows, mask=real, other=0.0, cache_modifier=".cg")
        part_acc = tl.load(acc_ptr + rows[:, :, None] * D + dims[None, None, :],
                           mask=real[:, :, None], other=0.0, cache_modifier=".cg")  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(part_max, 0))
        shrink, weight = tl.exp2(row_max - new_max), tl.exp2(part_max - new_max[None, :])
        row_sum = row_sum * shrink + tl.sum(part_sum * weight, 0)
        acc = acc * shrink[:, None] + tl.sum(part_acc * weight[:, :, None], 0)
        row_max = new_max
    return row_sum, acc
