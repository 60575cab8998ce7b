"""Goes over the blocks once for each query head: two heads that share K and V read them twice."""

import torch
from attention import attend as of_all_heads
from blocks import PagedEngine
from sampler import sample


class Head:
    def __init__(self, tiles, head):
        self.tiles, self.head = tiles, head

    def __getitem__(self, block):
        return self.tiles[block][:, self.head : self.head + 1]


def attend(query, keys, values, table, start):
    group = query.shape[1] // keys.shape[2]
    heads = range(query.shape[1])
    return torch.cat(
        [of_all_heads(query[:, h : h + 1], Head(keys, h // group), Head(values, h // group), table, start) for h in heads], 1
    )


class Wrong(PagedEngine):
    attend = staticmethod(attend)


def make(folder, limits, device):
    return Wrong(folder, limits)
