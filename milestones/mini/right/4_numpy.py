"""Attention in numpy: a softmax of each block, then two parts become one by their logarithms of sums."""

import numpy
import torch
from attention import TiledEngine
from sampler import sample


def attend(query, keys, values, table, start):
    n, heads, dim = query.shape
    group, size = heads // keys.shape[2], keys.shape[1]
    q, at = query.double().numpy() / dim**0.5, start + numpy.arange(n)
    norm, out = numpy.full((n, heads), -numpy.inf), numpy.zeros((n, heads, dim))
    for place in range(-(-(start + n) // size)):
        there = min(size, start + n - place * size)
        k, v = (part[table[place]][:there].numpy().repeat(group, 1) for part in (keys, values))  # [b, Hq, D]
        scores = numpy.einsum("nhd,bhd->nhb", q, k)
        scores[at[:, None].repeat(heads, 1)[..., None] < place * size + numpy.arange(there)] = -numpy.inf
        largest = numpy.maximum(scores.max(-1), -1e300)
        weights = numpy.exp(scores - largest[..., None])
        total = weights.sum(-1)
        with numpy.errstate(divide="ignore"):
            both = numpy.logaddexp(norm, largest + numpy.log(total))
        part = numpy.einsum("nhb,bhd->nhd", weights, v) / numpy.maximum(total, 1e-300)[..., None]
        with numpy.errstate(divide="ignore"):
            share = numpy.exp(largest + numpy.log(total) - both)
        out = out * numpy.exp(norm - both)[..., None] + part * share[..., None]
        norm = both
    return torch.from_numpy(out).float()


class Engine(TiledEngine):
    attend = staticmethod(attend)


def make(folder, limits, device):
    return Engine(folder, limits)
