"""Leaves the exponent at 2**23 for every place: a code that lies 4 bits higher is 16 times as large."""


@triton.jit
def code(words, i: tl.constexpr, exponent):
    PLACE: tl.constexpr = i % 5
    if i >= 5:
        words = words >> 20
    bits = (words & (15 << 4 * PLACE)) | exponent
    return bits.to(tl.float32, bitcast=True) - ((1 << 23) + 8)
