"""Rounds the weights to the dtype of the queries for their product: it is the values that they meet."""


def online_softmax_tile(q, k, v, visible, row_max, row_sum, acc, scale):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [M, N]
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))  # [M]
    weights = tl.exp2(scores - new_max[:, None])  # [M, N]
    shrink = tl.exp2(row_max - new_max)  # [M]
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype).to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_max, row_sum, acc
