"""Codes of 8 and 4 bits become floats of 16 bits, several at a time, where they lie: no number moves to another thread.

A conversion is one instruction for one number, at a fraction of the usual rate. To place bits is two to five for two numbers.
Assembly is for bfloat16 on a GPU; other dtypes, and Triton's interpreter, have the same numbers by plain arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from folovllm.kernels.fp8 import INTERPRETED
from folovllm.kernels.int4_linear import code
from folovllm.kernels.small_linear import append

# Four codes of FP8, the bytes of $4, as float16: two at a time, where the card has such numbers ...
FP8_TO_HALF = tl.constexpr("""{ .reg .b16 low, high; .reg .b32 two;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 two, low;
    mov.b32 {$0, $1}, two;
    cvt.rn.f16x2.e4m3x2 two, high;
    mov.b32 {$2, $3}, two; }""")
# ... and elsewhere the bits of a float16 whose exponent counts from another number, 8 less.
FP8_BITS_TO_HALF = tl.constexpr("""{ .reg .b32 two, bits, power, sign;
    mov.b32 power, 0x5C005C00;
    mov.b32 sign, 0x80008000;
    prmt.b32 two, $4, 0, 0x1404;
    shr.u32 bits, two, 1;
    and.b32 bits, bits, 0x3F803F80;
    lop3.b32 bits, two, sign, bits, 0xEA;
    mul.rn.f16x2 bits, bits, power;
    mov.b32 {$0, $1}, bits;
    prmt.b32 two, $4, 0, 0x3424;
    shr.u32 bits, two, 1;
    and.b32 bits, bits, 0x3F803F80;
    lop3.b32 bits, two, sign, bits, 0xEA;
    mul.rn.f16x2 bits, bits, power;
    mov.b32 {$2, $3}, bits; }""")
# Four of int8: a float16's fraction counts ones from 1,024 on. A code plus 128, put there, is 1,152 too large.
INT8_TO_HALF = tl.constexpr("""{ .reg .b32 all, two, base, less;
    mov.b32 base, 0x64646464;
    mov.b32 less, 0x64806480;
    xor.b32 all, $4, 0x80808080;
    prmt.b32 two, all, base, 0x4140;
    sub.rn.f16x2 two, two, less;
    mov.b32 {$0, $1}, two;
    prmt.b32 two, all, base, 0x4342;
    sub.rn.f16x2 two, two, less;
    mov.b32 {$2, $3}, two; }""")


@triton.jit
def byte(words, i: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Byte i of each word as a number of DTYPE, not yet multiplied by its scale."""
    if KIND == "int8":
        number = ((words << (24 - 8 * i)) >> 24).to(tl.float32).to(DTYPE)
    elif KIND == "fp8":
        number = ((words >> 8 * i) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:  # the bits of a float16 whose exponent counts from another number: 8 less
        bits = (words >> 8 * i).to(tl.int16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        number = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(DTYPE)
    return number


@triton.jit
def four_bytes(words, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Words [rows, n] of four codes as numbers [rows, 4 n], in the order of the inputs."""
    OUT: tl.constexpr = "=h,=h,=h,=h,r"
    TYPES: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
    if DTYPE != tl.float16 or INTERPRETED:  # noqa: SIM300
        a, b = byte(words, 0, KIND, DTYPE), byte(words, 1, KIND, DTYPE)
        c, d = byte(words, 2, KIND, DTYPE), byte(words, 3, KIND, DTYPE)
    elif KIND == "int8":
        a, b, c, d = tl.inline_asm_elementwise(INT8_TO_HALF, OUT, [words], TYPES, True, 1)
    elif KIND == "fp8":
        a, b, c, d = tl.inline_asm_elementwise(FP8_TO_HALF, OUT, [words], TYPES, True, 1)
    else:
        a, b, c, d = tl.inline_asm_elementwise(FP8_BITS_TO_HALF, OUT, [words], TYPES, True, 1)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [words.shape[0], 4 * words.shape[1]])


SHIFT = tl.constexpr(136)  # how much larger `nibbles` are than codes less 8
# Eight codes of 4 bits, each plus 128: a bfloat16's fraction counts ones from there on, and each half of a word has room for one.
EIGHT_TO_BFLOAT16 = tl.constexpr("""{ .reg .b32 part, two, base;
    mov.b32 base, 0x43004300;
    lop3.b32 two, $8, 0x000F000F, base, 0xEA;
    mov.b32 {$0, $4}, two;
    shr.u32 part, $8, 4;
    lop3.b32 two, part, 0x000F000F, base, 0xEA;
    mov.b32 {$1, $5}, two;
    shr.u32 part, $8, 8;
    lop3.b32 two, part, 0x000F000F, base, 0xEA;
    mov.b32 {$2, $6}, two;
    shr.u32 part, $8, 12;
    lop3.b32 two, part, 0x000F000F, base, 0xEA;
    mov.b32 {$3, $7}, two; }""")


@triton.jit
def nibbles(words, exponent, DTYPE: tl.constexpr):
    """Codes 0 to 7 of each word, plus 128, exact in DTYPE: eight tiles."""
    FOUR: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
    tiles = ()
    if DTYPE != tl.bfloat16 or INTERPRETED:  # noqa: SIM300
        for i in tl.static_range(8):
            tiles = append(tiles, (code(words, i, exponent) + SHIFT).to(DTYPE))
    else:
        tiles = tl.inline_asm_elementwise(EIGHT_TO_BFLOAT16, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], FOUR + FOUR, True, 1)
    return tiles
