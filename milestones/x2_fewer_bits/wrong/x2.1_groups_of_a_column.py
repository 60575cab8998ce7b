"""Lays the groups' scales out in turns, as if neighbouring inputs belonged to different groups."""


def dequantize_groups(codes, scales, zeros):
    group_size = codes.shape[1] // scales.shape[1]
    steps = codes.to(torch.int16) - zeros.repeat(1, group_size).to(torch.int16)
    return steps.to(scales.dtype) * scales.repeat(1, group_size)
