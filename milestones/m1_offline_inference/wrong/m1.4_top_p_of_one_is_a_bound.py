"""Compares with 1 like with any other top_p: where the sum is rounded to 1 early, unlikely tokens are dropped."""

import torch


def apply_top_p_filtering(logits, top_p):
    ordered, order = logits.sort(stable=True, dim=-1, descending=True)
    probs = ordered.softmax(-1)
    drop = probs.cumsum(-1) - probs >= top_p[:, None]
    drop[:, 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
