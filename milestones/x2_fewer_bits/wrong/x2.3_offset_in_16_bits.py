"""Computes the offset in the 16 bits of the scales: it is rounded, and then multiplied by the sum of all x."""


@triton.jit
def load_scales(scale_ptr, zero_ptr, at, inside):
    scale = tl.load(scale_ptr + at, mask=inside, other=0)
    offset = scale
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + at, mask=inside, other=0)
        offset = (8 - zero.to(scale.dtype)) * scale if zero_ptr.dtype.element_ty == tl.uint8 else zero + 8 * scale
    return scale.to(tl.float32), offset.to(tl.float32)
