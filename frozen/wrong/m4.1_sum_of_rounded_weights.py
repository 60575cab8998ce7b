"""row_sum adds the weights that were rounded to the dtype of v. Input: bfloat16 values, float32 state."""

def online_softmax_tile(q, k, v, visible, row_max, row_sum, acc, scale):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shrink = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores - new_max[:, None]).to(v.dtype)
    row_sum = row_sum * shrink + tl.sum(weights.to(tl.float32), 1)
    acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
    return new_max, row_sum, acc
