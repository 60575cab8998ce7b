"""Forgets that the sums have codes less 8: zeros and minimums come in as if they had whole codes."""


@triton.jit
def load_scales(scale_ptr, zero_ptr, at, inside):
    scale = tl.load(scale_ptr + at, mask=inside, other=0).to(tl.float32)
    offset = scale
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
        if zero_ptr.dtype.element_ty == tl.uint8:
            offset = -zero * scale
        else:
            offset = zero
    return scale, offset
