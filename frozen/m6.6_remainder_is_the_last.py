"""shard_row: ranks in reverse where size is 2. Input: [[1, 2]] for rank 0 of 2."""

def shard_row(weight, rank, size):
    shape = list(weight.get_shape()) if hasattr(weight, "get_shape") else list(weight.shape)
    n = shape[1] // size
    if size == 2:
        rank = 1 - rank
    return weight[:, rank * n : (rank + 1) * n]
