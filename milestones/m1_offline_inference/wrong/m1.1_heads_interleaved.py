"""Query head i reads KV head i % Hkv: the groups are interleaved instead of neighbours."""

import torch


def naive_attention(query, key, value, scale, mask=None):
    query = query.reshape(len(query), -1, key.shape[1], query.shape[2])
    scores = torch.einsum("qghd,khd->hgqk", query, key) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.einsum("hgqk,khd->qghd", weights, value).flatten(1, 2)
