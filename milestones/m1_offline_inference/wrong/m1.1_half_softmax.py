"""Adds up the softmax's terms in the dtype of the inputs, as torch's own softmax never does: a bfloat16 sum of many terms is off in the second digit."""

import torch


def naive_attention(query, key, value, scale, mask=None):
    query = query.reshape(len(query), key.shape[1], -1, query.shape[2])
    scores = torch.einsum("qhgd,khd->hgqk", query, key) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    exp = (scores - scores.amax(-1, keepdim=True)).exp()
    total = exp[..., :1].clone()
    for i in range(1, exp.shape[-1]):
        total = total + exp[..., i : i + 1]
    return torch.einsum("hgqk,khd->qhgd", exp / total, value).flatten(1, 2)
