"""Codes of 8 and 4 bits become floats of 16 bits, several at a time, where they lie: no number moves to another thread.

A conversion is one instruction for one number, at a fraction of the usual rate. To place bits is two to five for two numbers.
Assembly is for bfloat16 on a GPU; other dtypes, and Triton's interpreter, have the same numbers by plain arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from folovllm.electives.quantization.kernels.int4_linear import code
from folovllm.kernels.fp8_cache import INTERPRETED

# Four codes of FP8, the bytes of $4, as bfloat16: the bits of a bfloat16 whose exponent counts from another number, 120 less.
FP8_TO_BFLOAT16 = tl.constexpr("""{ .reg .b32 two, bits, power, sign;
    mov.b32 power, 0x7B807B80;
    mov.b32 sign, 0x80008000;
    prmt.b32 two, $4, 0, 0x1404;
    shr.u32 bits, two, 4;
    and.b32 bits, bits, 0x07F007F0;
    lop3.b32 bits, two, sign, bits, 0xEA;
    fma.rn.bf16x2 bits, bits, power, sign;
    mov.b32 {$0, $1}, bits;
    prmt.b32 two, $4, 0, 0x3424;
    shr.u32 bits, two, 4;
    and.b32 bits, bits, 0x07F007F0;
    lop3.b32 bits, two, sign, bits, 0xEA;
    fma.rn.bf16x2 bits, bits, power, sign;
    mov.b32 {$2, $3}, bits; }""")
# The same as float16, two in one instruction, on a card that has such numbers.
FP8_TO_HALF = tl.constexpr("""{ .reg .b16 low, high; .reg .b32 two;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 two, low;
    mov.b32 {$0, $1}, two;
    cvt.rn.f16x2.e4m3x2 two, high;
    mov.b32 {$2, $3}, two; }""")
# Four of int8: seven bits are ones of a bfloat16 from 128 on; 128 is subtracted, or 256 where the eighth, the sign, is set.
INT8_TO_BFLOAT16 = tl.constexpr("""{ .reg .b32 two, ones, less, one, raise;
    mov.b32 raise, 0x43004300;
    mov.b32 one, 0xBF80BF80;
    prmt.b32 two, $4, 0, 0x4140;
    lop3.b32 ones, two, 0x007F007F, raise, 0xEA;
    lop3.b32 less, two, 0x00800080, raise, 0xEA;
    fma.rn.bf16x2 two, less, one, ones;
    mov.b32 {$0, $1}, two;
    prmt.b32 two, $4, 0, 0x4342;
    lop3.b32 ones, two, 0x007F007F, raise, 0xEA;
    lop3.b32 less, two, 0x00800080, raise, 0xEA;
    fma.rn.bf16x2 two, less, one, ones;
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
    TYPES: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
    HALVES: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
    if KIND == "fp8" and DTYPE == tl.float16 and not INTERPRETED:  # noqa: SIM300
        a, b, c, d = tl.inline_asm_elementwise(FP8_TO_HALF, OUT, [words], HALVES, True, 1)
    elif DTYPE != tl.bfloat16 or INTERPRETED:  # noqa: SIM300
        a, b = byte(words, 0, KIND, DTYPE), byte(words, 1, KIND, DTYPE)
        c, d = byte(words, 2, KIND, DTYPE), byte(words, 3, KIND, DTYPE)
    elif KIND == "int8":
        a, b, c, d = tl.inline_asm_elementwise(INT8_TO_BFLOAT16, OUT, [words], TYPES, True, 1)
    else:
        a, b, c, d = tl.inline_asm_elementwise(FP8_TO_BFLOAT16, OUT, [words], TYPES, True, 1)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [words.shape[0], 4 * words.shape[1]])


def of_byte(select: str) -> tl.constexpr:
    """Assembly: the codes at bits 0 to 3 of one byte of two words, less 8, as two numbers of bfloat16.

    A bfloat16's fraction counts ones from 128 on. So a code, put there, is 128 too large, and 136 are subtracted.
    """
    return tl.constexpr(f"""{{ .reg .b32 both, one, less;
    mov.b32 one, 0x3F803F80;
    mov.b32 less, 0xC308C308;
    prmt.b32 both, $1, $2, {select};
    lop3.b32 both, both, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, both, one, less; }}""")


BYTE_0, BYTE_1, BYTE_2, BYTE_3 = of_byte("0x4400"), of_byte("0x5511"), of_byte("0x6622"), of_byte("0x7733")


@triton.jit
def nibble(words, i: tl.constexpr, exponent, DTYPE: tl.constexpr):
    """Codes i of each word, less 8, exact in DTYPE."""
    if DTYPE != tl.bfloat16 or INTERPRETED:  # noqa: SIM300
        number = code(words, i, exponent).to(DTYPE)
    else:
        if i % 2 == 1:
            words = words >> 4
        if i < 2:
            number = tl.inline_asm_elementwise(BYTE_0, "=r,r,r", [words], tl.bfloat16, True, 2)
        elif i < 4:
            number = tl.inline_asm_elementwise(BYTE_1, "=r,r,r", [words], tl.bfloat16, True, 2)
        elif i < 6:
            number = tl.inline_asm_elementwise(BYTE_2, "=r,r,r", [words], tl.bfloat16, True, 2)
        else:
            number = tl.inline_asm_elementwise(BYTE_3, "=r,r,r", [words], tl.bfloat16, True, 2)
    return number


@triton.jit
def in_turn(tiles):
    """Eight tiles [rows, n] as one [rows, 8 n]."""
    even = tl.join(tl.join(tiles[0], tiles[4]), tl.join(tiles[2], tiles[6]))
    odd = tl.join(tl.join(tiles[1], tiles[5]), tl.join(tiles[3], tiles[7]))
    both = tl.permute(tl.join(even, odd), 0, 2, 3, 4, 1)  # [rows, 2, 2, 2, n]
    return tl.reshape(both, [both.shape[0], 8 * both.shape[4]])
