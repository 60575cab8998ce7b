"""Takes off the power of two, and not the 8 that the sums are less: each weight is eight steps too large."""


@triton.jit
def code(words, i: tl.constexpr, exponent):
    PLACE: tl.constexpr = i % 5
    if i >= 5:
        words = words >> 20
    bits = (words & (15 << 4 * PLACE)) | (exponent - (4 * PLACE << 23))
    return bits.to(tl.float32, bitcast=True) - (1 << 23 - 4 * PLACE)
