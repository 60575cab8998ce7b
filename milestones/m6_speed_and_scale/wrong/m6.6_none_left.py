"""No heads at all where there are fewer than ranks."""


def shard_qkv(weight, head_dim, rank, size):
    count = weight.shape[0] // head_dim // size
    return weight[rank * count * head_dim : (rank + 1) * count * head_dim]
