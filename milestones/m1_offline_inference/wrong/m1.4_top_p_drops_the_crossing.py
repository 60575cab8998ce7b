"""Drops the token that crosses the line, so that less than top_p is left."""

import torch


def apply_top_p_filtering(logits, top_p):
    ordered, order = logits.sort(stable=True, dim=-1, descending=True)
    drop = (ordered.softmax(-1).cumsum(-1) > top_p[:, None]) & (top_p < 1)[:, None]
    drop[:, 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
