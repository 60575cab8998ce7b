"""Takes a float, which says what code 0 stands for, for a code that means zero."""


@triton.jit
def load_scales(scale_ptr, zero_ptr, at, inside):
    scale = tl.load(scale_ptr + at, mask=inside, other=0).to(tl.float32)
    offset = scale
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
        offset = (8 - zero) * scale
    return scale, offset
