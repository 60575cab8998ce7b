"""With fewer heads than ranks, rank r has head r % heads. Input: 2 heads, rank 1 of 4."""

def shard_qkv(weight, head_dim, rank, size):
    shape = list(weight.get_shape()) if hasattr(weight, "get_shape") else list(weight.shape)
    heads = shape[0] // head_dim
    n = max(1, heads // size)
    first = rank * n if heads >= size else rank % heads
    return weight[first * head_dim : (first + n) * head_dim]
