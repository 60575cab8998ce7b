"""Filters on logits, as pure functions: logits of dropped tokens become -inf.

Every filter takes `logits [S, V]` and one value a row, and keeps at least one token.
"""

from __future__ import annotations

import torch


def apply_min_p_filtering(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Drop tokens whose probability is below `min_p` times the largest one ("min-p sampling", Nguyen et al. 2024).

    Args:
        logits: [S, V]. min_p: [S] in 0..1; 0 drops nothing.

    A ratio of probabilities is a difference of logits, so no softmax is needed.
    """
    threshold = logits.amax(-1, keepdim=True) + torch.log(min_p)[:, None]
    return logits.masked_fill(logits < threshold, -torch.inf)


def apply_top_k_filtering(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keep the `top_k` largest logits of each row, and those equal to the last of them.

    Args:
        logits: [S, V]. top_k: [S] int64; 0 or less, or V and more, keeps all.
    """
    vocab_size = logits.shape[-1]
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    kth = logits.sort(-1, descending=True).values.gather(-1, k[:, None] - 1)  # [S, 1]
    return logits.masked_fill(logits < kth, -torch.inf)


def apply_top_p_filtering(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of most likely tokens that has probability `top_p` ("nucleus", Holtzman et al. 2019).

    Args:
        logits: [S, V]. top_p: [S] in (0, 1]; 1 keeps all.

    A token goes if those more likely than it already reach `top_p`; so the one that crosses the line stays. Of equally
    likely ones the lower id comes first.
    """
    ordered, order = logits.sort(stable=True, dim=-1, descending=True)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs  # probability of all that come earlier
    drop = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    drop[:, 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
