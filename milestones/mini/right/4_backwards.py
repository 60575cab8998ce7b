"""Reads the blocks from the last to the first, and query by query where it computes."""

import torch
from attention import TiledEngine
from sampler import sample


def attend(query, keys, values, table, start):
    n, heads, dim = query.shape
    size, end = keys.shape[1], start + n
    largest, total = torch.full((n, heads), -torch.inf), torch.zeros(n, heads)
    summed = torch.zeros_like(query)
    for place in reversed(range(-(-end // size))):
        first = place * size
        k = keys[table[place], : end - first].repeat_interleave(heads // keys.shape[2], 1)  # [b, Hq, D]
        v = values[table[place], : end - first].repeat_interleave(heads // keys.shape[2], 1)
        for i in range(n):
            seen = start + i + 1 - first
            if seen <= 0:
                continue
            scores = (query[i] * k[:seen]).sum(-1).T / dim**0.5  # [Hq, b]
            new = torch.maximum(largest[i], scores.amax(-1))
            weights, shrink = (scores - new[:, None]).exp(), (largest[i] - new).exp()
            total[i] = total[i] * shrink + weights.sum(-1)
            summed[i] = summed[i] * shrink[:, None] + torch.einsum("hb,bhd->hd", weights, v[:seen])
            largest[i] = new
    return summed / total[..., None]


class Engine(TiledEngine):
    attend = staticmethod(attend)


def make(folder, limits, device):
    return Engine(folder, limits)
