"""With fewer heads than ranks every rank gets all of them: queries then find the wrong one, and K/V takes more memory."""


def shard_qkv(weight, head_dim, rank, size):
    heads = weight.shape[0] // head_dim
    if heads < size:
        return weight[:]
    count = heads // size
    return weight[rank * count * head_dim : (rank + 1) * count * head_dim]
