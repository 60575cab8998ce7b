"""shard_column cuts only matrices: a bias stays whole. Input: a bias of 4, size 2."""

def shard_column(weight, rank, size):
    shape = list(weight.get_shape()) if hasattr(weight, "get_shape") else list(weight.shape)
    if len(shape) == 1:
        return weight[:]
    n = shape[0] // size
    return weight[rank * n : (rank + 1) * n]
