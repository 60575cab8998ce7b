"""Asks whether a group has a range before its step is rounded: in 16 bits a small one becomes a scale of 0."""

import torch


def find_scales(w, bits, group_size, symmetric):
    check_group_size(w.shape[1], group_size)
    top = 2**bits - 1
    low, high = w.float().unflatten(1, (-1, group_size)).aminmax(dim=2)
    low, high = low.clamp(max=0), high.clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    step = (high - low) / top
    scales = torch.where(step > 0, step, torch.ones_like(step)).to(w.dtype)
    zeros = torch.full_like(low, (top + 1) // 2) if symmetric else (-low / scales.float()).round().clamp(0, top)
    return scales, zeros.to(torch.uint8)
