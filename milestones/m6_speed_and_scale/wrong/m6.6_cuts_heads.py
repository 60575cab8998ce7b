"""An equal share of the rows: with fewer heads than ranks, each rank gets a piece of a head."""


def shard_qkv(weight, head_dim, rank, size):
    rows = weight.shape[0] // size
    return weight[rank * rows : (rank + 1) * rows]
