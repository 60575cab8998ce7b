"""Each rank has one head, however many there are. Input: 4 heads, 2 ranks."""

def shard_qkv(weight, head_dim, rank, size):
    shape = list(weight.get_shape()) if hasattr(weight, "get_shape") else list(weight.shape)
    heads = shape[0] // head_dim
    first = rank * heads // size
    return weight[first * head_dim : (first + 1) * head_dim]
