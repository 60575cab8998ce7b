"""The zero is found with the scale before that is rounded. Input: bfloat16 weights, 8 bits, a group from -200 to 55 steps."""

def find_scales(w, bits, group_size, symmetric):
    groups = w.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = (high - low) / (2**bits - 1)
    scales = torch.where(scales > 0, scales, 1.0)
    zeros = torch.full_like(scales, 2 ** (bits - 1)) if symmetric else (-low / scales).round()
    rounded = scales.to(w.dtype)
    rounded = torch.where(rounded > 0, rounded, torch.ones_like(rounded))
    return rounded, zeros.clamp(0, 2**bits - 1).to(torch.uint8)
