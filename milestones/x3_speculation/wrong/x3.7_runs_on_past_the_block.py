"""Counts slots on from the first one: behind the end of a block comes the block of another sequence."""

import torch


def chain_places(newest, block_tables, block_size, k):
    last = block_tables.shape[1] * block_size - 1
    positions = (newest - 1 + torch.arange(k, device=newest.device)[:, None]).clamp(0, last)
    blocks = block_tables[torch.arange(len(newest), device=newest.device), positions[0] // block_size].long()
    slots = blocks * block_size + positions[0] % block_size + positions - positions[0]
    return positions, torch.where(newest < 0, -1, slots)
