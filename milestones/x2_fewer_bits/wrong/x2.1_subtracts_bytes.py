"""Takes the zero from the code in unsigned bytes: what lies below zero becomes a large positive number."""


def dequantize_groups(codes, scales, zeros):
    group_size = codes.shape[1] // scales.shape[1]
    return (codes - spread(zeros, group_size)).to(scales.dtype) * spread(scales, group_size)
