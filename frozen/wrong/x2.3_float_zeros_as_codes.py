"""Takes zeros in floats for codes that mean zero, too. Input: float zeros, which are what code 0 stands for."""

def load_scales(scale_ptr, zero_ptr, at, inside):
    scale = tl.load(scale_ptr + at, mask=inside, other=0.0).to(tl.float32)
    offset = scale
    if zero_ptr is not None:
        offset = scale * (8.0 - tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32))
    return scale, offset
