"""Leaves float32 products at Triton's default, which on a GPU is TF32: ten bits of mantissa."""


def online_softmax_tile(q, k, v, visible, row_max, row_sum, acc, scale):
    scores = tl.dot(q, tl.trans(k)) * scale  # [M, N]
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))  # [M]
    weights = tl.exp2(scores - new_max[:, None])  # [M, N]
    shrink = tl.exp2(row_max - new_max)  # [M]
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return new_max, row_sum, acc
