"""Puts the first pair at the newest token: the head's K and V have a hole before it, which all later pairs read."""

import torch


def chain_places(newest, block_tables, block_size, k):
    last = block_tables.shape[1] * block_size - 1
    positions = (newest + torch.arange(k, device=newest.device)[:, None]).clamp(0, last)
    blocks = block_tables[torch.arange(len(newest), device=newest.device), positions // block_size].long()
    return positions, torch.where(newest < 0, -1, blocks * block_size + positions % block_size)
