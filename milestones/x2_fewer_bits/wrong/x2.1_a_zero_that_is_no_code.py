"""Does not hold zeros between the ends: a step that was rounded down to few of float16's smallest numbers needs more of them than there are codes."""

import torch


def find_scales(w, bits, group_size, symmetric):
    check_group_size(w.shape[1], group_size)
    top = 2**bits - 1
    low, high = w.float().unflatten(1, (-1, group_size)).aminmax(dim=2)
    low, high = low.clamp(max=0), high.clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).to(w.dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    zeros = torch.full_like(low, (top + 1) // 2) if symmetric else (-low / scales.float()).round()
    return scales, zeros.to(torch.uint8)
