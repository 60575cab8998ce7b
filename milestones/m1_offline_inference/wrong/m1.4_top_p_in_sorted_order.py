"""Applies the mask of the sorted places to the token ids as they are."""

import torch


def apply_top_p_filtering(logits, top_p):
    ordered = logits.sort(dim=-1, descending=True).values
    probs = ordered.softmax(-1)
    drop = (probs.cumsum(-1) - probs >= top_p[:, None]) & (top_p < 1)[:, None]
    drop[:, 0] = False
    return logits.masked_fill(drop, -torch.inf)
