"""Adds -inf where a key is not seen, and scales the queries' products by the state before."""

def online_softmax_tile(q, k, v, visible, row_max, row_sum, acc, scale):
    bias = tl.where(visible, 0.0, float("-inf"))
    scores = tl.trans(tl.dot(k, tl.trans(q), input_precision="ieee")) * scale + bias
    top = tl.maximum(tl.max(scores, axis=1), row_max)
    p = tl.exp2(scores - tl.expand_dims(top, 1))
    keep = tl.exp2(row_max - top)
    added = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return top, keep * row_sum + tl.sum(p, axis=1), tl.expand_dims(keep, 1) * acc + added
