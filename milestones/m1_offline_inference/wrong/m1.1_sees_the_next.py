"""Off by one: a token also sees the one after it."""

import torch


def create_causal_mask(num_new, num_total, device=None):
    query_position = torch.arange(num_total - num_new, num_total, device=device)
    key_position = torch.arange(num_total, device=device)
    return query_position[:, None] + 1 >= key_position[None, :]
