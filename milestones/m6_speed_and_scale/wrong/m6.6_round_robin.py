"""Deals KV heads out in turn: every head is somewhere, and queries read those of another group."""


def shard_qkv(weight, head_dim, rank, size):
    heads = weight.shape[0] // head_dim
    if heads >= size:
        count = heads // size
        return weight[rank * count * head_dim : (rank + 1) * count * head_dim]
    first = rank % heads
    return weight[first * head_dim : (first + 1) * head_dim]
