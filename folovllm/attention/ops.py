"""Attention in plain torch, the reference for every kernel, and a cache that grows."""

from __future__ import annotations

import torch


def create_causal_mask(num_new: int, num_total: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Who may look at whom: True where a new token may attend to a cached or new one.

    The `num_new` queries are the *last* tokens of `num_total`: query i sits at position `num_total - num_new + i` and
    sees every position up to and including its own. With nothing cached this is the usual lower triangle; one new token
    sees everything.

    Returns:
        bool, [num_new, num_total].
    """
    query_position = torch.arange(num_total - num_new, num_total, device=device)
    key_position = torch.arange(num_total, device=device)
    return query_position[:, None] >= key_position[None, :]


def naive_attention(
    query: torch.Tensor,  # [Tq, Hq, D]
    key: torch.Tensor,  # [Tk, Hkv, D]
    value: torch.Tensor,  # [Tk, Hkv, D]
    scale: float,
    mask: torch.Tensor | None = None,  # [Tq, Tk] bool, True: may attend; None: everything
) -> torch.Tensor:
    """softmax(scale * Q K^T) V of one sequence, every score written out ("Attention Is All You Need", section 3.2.1).

    Grouped queries (GQA): Hq is a multiple G of Hkv, and query heads h*G .. h*G+G-1 share KV head h. Scores that the
    mask forbids count as -inf. The softmax is taken in float32 whatever the dtype of the inputs, and its result returns to
    their dtype. (torch's adds up in float32 in any case; a sum of your own, of thousands of bfloat16 terms, would be off
    in the second digit.) A row in which nothing is allowed gives NaN.

    Returns:
        [Tq, Hq, D], in the dtype of `value`.
    """
    query = query.reshape(len(query), key.shape[1], -1, query.shape[2])  # [Tq, Hkv, G, D]
    scores = torch.einsum("qhgd,khd->hgqk", query, key) * scale  # [Hkv, G, Tq, Tk]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.einsum("hgqk,khd->qhgd", weights, value).flatten(1, 2)  # [Tq, Hq, D]


def append_kv(cached: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the cache of one sequence with its new tokens appended: [2, n, Hkv, D] and two [T, Hkv, D] -> [2, n + T, Hkv, D].

    The result is a new tensor, so every step copies all cached tokens.
    """
    return torch.cat((cached, torch.stack((key, value))), dim=1)
