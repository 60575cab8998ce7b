"""Stage 4: attention that visits each block once, and keeps no score and no copy of the keys."""

import torch
from blocks import PagedEngine
from torch import Tensor


def attend(query: Tensor, keys: Tensor, values: Tensor, table: list[int], start: int) -> Tensor:
    """Causal attention of one sequence by an online softmax (Milakov and Gimelshein 2018; FlashAttention).

    `query` [n, Hq, D] are at positions `start` and on. `keys[b]` and `values[b]` read block b [B, Hkv, D]; token p of the
    sequence is in block table[p // B]. Slots behind the last token hold anything. Returns [n, Hq, D].

    For each query it keeps the largest score so far, the sum of the weights and the weighted sum of the values. A block with
    a larger score makes what was summed smaller, once.
    """
    n, num_heads, dim = query.shape
    positions, end, first = torch.arange(start, start + n), start + n, 0
    for block in table:
        if first >= end:
            break
        key, value = keys[block][: end - first], values[block][: end - first]  # [b, Hkv, D]
        if first == 0:
            grouped = query.view(n, key.shape[1], -1, dim) / dim**0.5  # [n, Hkv, G, D]
            largest = query.new_full(grouped.shape[:-1], -torch.inf)
            total, summed = torch.zeros_like(largest), torch.zeros_like(grouped)
        scores = torch.einsum("nhgd,bhd->nhgb", grouped, key)
        future = torch.arange(first, first + len(key)) > positions[:, None]  # [n, b]
        scores = scores.masked_fill(future[:, None, None], -torch.inf)
        new = torch.maximum(largest, scores.amax(-1))  # finite: every query sees the first token
        weights, shrink = (scores - new[..., None]).exp(), (largest - new).exp()
        total = total * shrink + weights.sum(-1)
        summed = summed * shrink[..., None] + torch.einsum("nhgb,bhd->nhgd", weights, value)
        largest, first = new, first + len(key)
    return (summed / total[..., None]).reshape(n, num_heads, dim)


class TiledEngine(PagedEngine):
    """A paged engine with this attention."""

    attend = staticmethod(attend)
