"""Counts queries from position 0, as if nothing were cached."""

import torch


def create_causal_mask(num_new, num_total, device=None):
    return torch.arange(num_new, device=device)[:, None] >= torch.arange(num_total, device=device)[None, :]
