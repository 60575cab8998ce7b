"""One largest score for all queries and heads: where the others are much smaller, all of their weights are 0."""

import torch
from blocks import PagedEngine
from sampler import sample


def attend(query, keys, values, table, start):
    n, num_heads, dim = query.shape
    positions, end, first = torch.arange(start, start + n), start + n, 0
    for block in table:
        if first >= end:
            break
        key, value = keys[block][: end - first], values[block][: end - first]
        if first == 0:
            grouped = query.view(n, key.shape[1], -1, dim) / dim**0.5
            largest = query.new_full(grouped.shape[:-1], -torch.inf)
            total, summed = torch.zeros_like(largest), torch.zeros_like(grouped)
        scores = torch.einsum("nhgd,bhd->nhgb", grouped, key)
        future = torch.arange(first, first + len(key)) > positions[:, None]
        scores = scores.masked_fill(future[:, None, None], -torch.inf)
        new = torch.maximum(largest, scores.amax().expand(scores.shape[:-1]))
        weights, shrink = (scores - new[..., None]).exp(), (largest - new).exp()
        total = total * shrink + weights.sum(-1)
        summed = summed * shrink[..., None] + torch.einsum("nhgb,bhd->nhgd", weights, value)
        largest, first = new, first + len(key)
    return (summed / total[..., None]).reshape(n, num_heads, dim)


class Wrong(PagedEngine):
    attend = staticmethod(attend)


def make(folder, limits, device):
    return Wrong(folder, limits)
