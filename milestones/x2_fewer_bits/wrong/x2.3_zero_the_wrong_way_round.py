"""Adds (z - 8) s: what lies above zero goes below it."""


@triton.jit
def load_scales(scale_ptr, zero_ptr, at, inside):
    scale = tl.load(scale_ptr + at, mask=inside, other=0).to(tl.float32)
    offset = scale
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
        if zero_ptr.dtype.element_ty == tl.uint8:
            offset = (zero - 8) * scale
        else:
            offset = zero + 8 * scale
    return scale, offset
