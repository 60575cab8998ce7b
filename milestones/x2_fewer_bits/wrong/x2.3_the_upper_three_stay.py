"""Does not bring codes 5 to 7 down: it reads codes 0 to 2 once more."""


@triton.jit
def code(words, i: tl.constexpr, exponent):
    PLACE: tl.constexpr = i % 5
    bits = (words & (15 << 4 * PLACE)) | (exponent - (4 * PLACE << 23))
    return bits.to(tl.float32, bitcast=True) - ((1 << 23 - 4 * PLACE) + 8)
