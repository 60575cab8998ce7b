"""Cuts what it has read: a rank that holds a quarter of the model first reads the whole, and so do the others."""


def shard_column(weight, rank, size):
    return weight[:].chunk(size, 0)[rank]


def shard_row(weight, rank, size):
    return weight[:].chunk(size, 1)[rank]
