"""Forgets that padding is skipped: its K and V land in a block that belongs to somebody."""

import torch


def chain_places(newest, block_tables, block_size, k):
    last = block_tables.shape[1] * block_size - 1
    positions = (newest - 1 + torch.arange(k, device=newest.device)[:, None]).clamp(0, last)
    blocks = block_tables[torch.arange(len(newest), device=newest.device), positions // block_size].long()
    return positions, blocks * block_size + positions % block_size
