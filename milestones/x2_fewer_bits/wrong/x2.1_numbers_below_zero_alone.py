"""Extends the range down to 0 only: where all numbers of a group are negative, 0 has no code."""

import torch


def find_scales(w, bits, group_size, symmetric):
    check_group_size(w.shape[1], group_size)
    top = 2**bits - 1
    low, high = w.float().unflatten(1, (-1, group_size)).aminmax(dim=2)
    low, high = low.clamp(max=0), high
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).to(w.dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    zeros = torch.full_like(low, (top + 1) // 2) if symmetric else (-low / scales.float()).round().clamp(0, top)
    return scales, zeros.to(torch.uint8)
