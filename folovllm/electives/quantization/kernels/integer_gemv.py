"""Codes of 8 or 4 bits that are integers, times one token: on the tensor cores, in integers.

What `quant_gemv` spends most instructions on is to make floats of codes. Here codes are bytes as they come, or one instruction
away from that (below), and a tensor core takes 32 of a row at once in place of 16. `x` becomes integers instead: four
bytes of each number are four columns of a product. That is long. So a program keeps `x` in registers, and takes several
groups of lines one after the other (TIMES).

`x` as four planes of bytes, and codes as bytes, in the order in which a tensor core that multiplies integers takes them.

The four bytes of the float 3 + x / p are the planes, where p is a power of two so large that this lies between 2.5 and 3.5.
For the lower three bytes hold 2^22 x / p as an integer with an offset, 0x40 in the third, and the fourth is always 0x40:

    2^22 x / p = byte 0 + 256 byte 1 + 65536 (byte 2 - byte 3)

Bytes are signed here, so what makes a byte negative is added to the next one first. Numbers of bfloat16 down to 2^-13 of the
largest are exact; what is smaller is off by 2^-21 of the largest at most.

That is the largest of what one warp has in a part: 384 inputs (4 bits) or 640 (8 bits) at most. If it is an outlier, the
others are less exact: at 2^-14 of it a number is off by twice what bfloat16 has rounded it by, at 2^-16 by eight times.
That shows where the outlier's weight is zero. But a quantizer has rounded that weight, by up to half a code; and all those
inputs together, with the largest codes and every error of one sign, are off by 640 * 128 * 2^-21 = 0.04 of a code times the
outlier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.electives.quantization.kernels.gemv_tiles import (
    finish,
    inverse_root,
    load_lines,
    load_pieces,
    load_residual,
    load_row_scales,
    sum_parts,
)
from folovllm.electives.quantization.weight import QuantizedWeight, kind_of
from folovllm.kernels.fp8_cache import INTERPRETED
from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.skinny_linear import append
from folovllm.kernels.variants import num_sms

PARTS = tl.constexpr(2)  # of a row: four columns each
PLANES = tl.constexpr(4)
THREE = tl.constexpr(0x40400000)  # the bits of 3.0
EXPONENT_BITS = tl.constexpr(0x7F800000)
TOO_LARGE = tl.constexpr(252 << 23)  # 2^125
# Two at once.
LARGER_BFLOAT16 = tl.constexpr("{ .reg .b32 x; abs.bf16x2 x, $2; max.NaN.bf16x2 $0, $1, x; }")
LARGER_FLOAT16 = tl.constexpr("{ .reg .b32 x; abs.f16x2 x, $2; max.NaN.f16x2 $0, $1, x; }")
FLIP = -0x77777778  # the uppermost bit of each four
# One byte of each of four floats, $5 says which.
SELECT = tl.constexpr("""{ .reg .b32 low, high;
    prmt.b32 low, $1, $2, $5;
    prmt.b32 high, $3, $4, $5;
    prmt.b32 $0, low, high, 0x5410; }""")


@triton.jit
def load_columns(
    x_ptr, columns_ptr, start: tl.constexpr, NUM: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Load the inputs of one tile of weights, from word `start` on, times the scales of input channels if there are any, in pieces.

    Row 8 s + c of a piece is column c of warp s: plane c % 4 of a part.
    """
    WHOLE: tl.constexpr = start + SPLITS * PARTS * WORDS <= NUM
    place, result = tl.arange(0, 8 * SPLITS)[:, None], ()
    word = (place // 8 * PARTS + place % 8 // PLANES) * WORDS + start
    xs = load_pieces(x_ptr, word, NUM, GROUP, KIND, WORDS, WHOLE)
    if columns_ptr is not None:
        factors = load_pieces(columns_ptr, word, NUM, GROUP, KIND, WORDS, WHOLE)
    for i in tl.static_range(len(xs)):
        result = append(result, xs[i] if columns_ptr is None else xs[i] * factors[i])
    return result


@triton.jit
def larger(peak, x):
    """The larger magnitude of each two, NaN if one of them is."""
    if INTERPRETED:
        peak = tl.maximum(peak, tl.abs(x), tl.PropagateNan.ALL)
    elif x.dtype == tl.bfloat16:
        peak = tl.inline_asm_elementwise(LARGER_BFLOAT16, "=r,r,r", [peak, x], tl.bfloat16, True, 2)
    else:
        peak = tl.inline_asm_elementwise(LARGER_FLOAT16, "=r,r,r", [peak, x], tl.float16, True, 2)
    return peak


@triton.jit
def largest(pieces):
    """The bits, as of a float32, of the largest magnitude of each row of all pieces, [rows, 1]. NaN is the largest."""
    peak = tl.zeros(pieces[0].shape, pieces[0].dtype)
    for i in tl.static_range(len(pieces)):
        peak = larger(peak, pieces[i])
    return tl.max(peak.to(tl.float32).to(tl.int32, bitcast=True), 1, keep_dims=True)


@triton.jit
def planes_of(pieces, KIND: tl.constexpr):
    """Pieces of `x` as planes, tiles [SPLITS, inputs, 8]; and what a unit of each row's plane is worth, [rows, 1].

    Numbers from 2^125 on are like infinities: the result is NaN.
    """
    bits = largest(pieces)
    plane = tl.arange(0, bits.shape[0])[:, None] % PLANES
    inverse = ((bits & EXPONENT_BITS) * -1 + TOO_LARGE).to(tl.float32, bitcast=True)
    offset = ((((plane * 0 + 1) << 8 * plane) - 1 & 0x8080) + THREE).to(tl.float32, bitcast=True)
    EACH: tl.constexpr = 8 if KIND == "int4" else 2
    planes = ()
    for i in tl.static_range(0, len(pieces), EACH):
        planes = append(planes, select(pieces, i, inverse, offset, plane, KIND))
    unit = (bits & EXPONENT_BITS).to(tl.float32, bitcast=True) * 2.0**-20
    return planes, tl.where(bits >= TOO_LARGE, float("nan"), unit)


@triton.jit
def select(x, i: tl.constexpr, inverse, offset, plane, KIND: tl.constexpr):
    """The bytes that belong to each row of a tile's pieces, from piece i on, as the right operand [SPLITS, inputs, 8]."""
    if KIND == "int4":
        even = one_byte(x[i], x[i + 2], x[i + 4], x[i + 6], inverse, offset, plane)
        odd = one_byte(x[i + 1], x[i + 3], x[i + 5], x[i + 7], inverse, offset, plane)
        tile = in_bytes(both_halves(even, odd), KIND)
    else:
        low, high = each_byte(x[i], inverse, offset, plane), each_byte(x[i + 1], inverse, offset, plane)
        tile = tl.reshape(both_halves(low, high), [low.shape[0] // 8, 8, 64])
    return tl.permute(tile, 0, 2, 1)


@triton.jit
def float_bits(x, inverse, offset):
    """The bits of `x` times `inverse` plus `offset`, a float32."""
    return (x.to(tl.float32) * inverse + offset).to(tl.int32, bitcast=True)


@triton.jit
def one_byte(a, b, c, d, inverse, offset, plane):
    """Byte `plane` of each of four such, in one word."""
    a, b = float_bits(a, inverse, offset), float_bits(b, inverse, offset)
    c, d = float_bits(c, inverse, offset), float_bits(d, inverse, offset)
    if INTERPRETED:
        a, b, c, d = (a >> 8 * plane) & 255, (b >> 8 * plane) & 255, (c >> 8 * plane) & 255, (d >> 8 * plane) & 255
        word = a | (b << 8) | (c << 16) | (d << 24)
    else:
        word = tl.inline_asm_elementwise(SELECT, "=r,r,r,r,r,r", [a, b, c, d, 0x40 + 0x11 * plane], tl.int32, True, 1)
    return word


@triton.jit
def each_byte(x, inverse, offset, plane):
    """The same of each number, as int8."""
    bits = float_bits(x, inverse, offset)
    if INTERPRETED:
        byte = (bits >> 8 * plane).to(tl.int8)
    else:
        byte = tl.inline_asm_elementwise(SELECT, "=r,r,r,r,r,r,r,r,r", [bits, 0x40 + 0x11 * plane], tl.int8, True, 4)
    return byte


@triton.jit
def both_halves(even, odd):
    """Two tiles [rows, n] side by side."""
    return tl.reshape(tl.permute(tl.join(even, odd), 0, 2, 1), [even.shape[0], 2 * even.shape[1]])


@triton.jit
def code_words(words, flip, KIND: tl.constexpr):
    """Words of codes as words of signed bytes. Of 4 bits: codes 0 2 4 6 of each, then 1 3 5 7; 16 times the code less 8.

    `flip` is FLIP. Were it a constant, it and the mask would be two in one operation, which is then made two.
    """
    if KIND == "int4":
        even, odd = ((words << 4) ^ flip) & -0x0F0F0F10, (words ^ flip) & -0x0F0F0F10
        words = both_halves(even, odd)
    return words


@triton.jit
def in_bytes(words, KIND: tl.constexpr):
    """Words [8 SPLITS, n] as bytes [SPLITS, 8, 4 n], in such an order that each stays in the thread that has it.

    Of 32 inputs a tensor core takes eight neighbours from each of four threads (so Triton lays it out).
    """
    EIGHTHS: tl.constexpr = words.shape[1] // 8  # of a word of each thread, twice
    if KIND == "int4":
        words = tl.permute(tl.reshape(words, [words.shape[0], 2, 4, EIGHTHS]), 0, 3, 2, 1)
    else:
        words = tl.permute(tl.reshape(words, [words.shape[0], 4, EIGHTHS, 2]), 0, 2, 1, 3)
    low = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    high = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    return tl.reshape(tl.join(low, high), [words.shape[0] // 8, 8, 32 * EIGHTHS])


@triton.jit
def sixteen_bytes(words, more, flip, KIND: tl.constexpr):
    """Words [8 SPLITS, WORDS] of rows 0 to 7, and of rows 8 to 15, as the left operand, [SPLITS, 16, inputs]."""
    low, high = in_bytes(code_words(words, flip, KIND), KIND), in_bytes(code_words(more, flip, KIND), KIND)
    return tl.reshape(tl.permute(tl.join(low, high), 0, 3, 1, 2), [low.shape[0], 16, low.shape[2]])


@triton.jit
def in_pairs(acc, EXACT: tl.constexpr):
    """Products with planes, [SPLITS, 16, 8], as floats [SPLITS, 16, 4]: of planes 0 and 1, and of 2 and 3.

    EXACT: they are of one tile, so the two together are less than 2^31. Else they are of 1,024 inputs at most, so each is
    2^24 at most, which is exact as a float32.
    """
    first, second = tl.split(tl.reshape(acc, [acc.shape[0], 16, 4, 2]))
    worth = tl.where(tl.arange(0, 4) % 2 == 0, 256, -1)[None, None, :]
    return (first + second * worth).to(tl.float32) if EXACT else first.to(tl.float32) + second.to(tl.float32) * worth


@triton.jit
def sums_of(xs, ZEROS: tl.constexpr):
    """What `x` sums up to in each tile, as `in_pairs`, [SPLITS, 16, 4], in all rows; nothing if there are no ZEROS."""
    result = ()
    for c in tl.static_range(len(xs) if ZEROS else 0):
        ones = tl.full([xs[c].shape[0], 16, xs[c].shape[1]], 1, tl.int8)
        result = append(result, in_pairs(tl.dot(ones, xs[c], out_dtype=tl.int32), True) * 16)
    return result


@triton.jit
def multiply(words, factors, xs, sums, flip, KIND: tl.constexpr, SPLITS: tl.constexpr):
    """The products of all tiles of words, [SPLITS, 16, 4], in units of a plane, or of a sixteenth of that."""
    total = tl.zeros([SPLITS, 16, 8], tl.int32)
    acc = tl.zeros([SPLITS, 16, 4], tl.float32)
    for c in tl.static_range(len(xs)):
        codes = sixteen_bytes(words[2 * c], words[2 * c + 1], flip, KIND)
        if len(factors) == 0:
            total = tl.dot(codes, xs[c], total, out_dtype=tl.int32)
        else:
            acc += in_pairs(tl.dot(codes, xs[c], out_dtype=tl.int32), True) * factors[c][0][:, :, None]
        if len(sums) > 0:
            acc += sums[c] * factors[c][1][:, :, None]
    return in_pairs(total, False) if len(factors) == 0 else acc


@triton.jit
def units_of(unit, KIND: tl.constexpr):
    """What each pair of planes is worth, [SPLITS, 1, 4], of what a row's plane is [8 SPLITS, 1]."""
    pair, _ = tl.split(tl.reshape(unit, [unit.shape[0] // 8, 1, 4, 2]))  # of both the same
    worth = tl.where(tl.arange(0, 4) % 2 == 0, 1.0, 65536.0) * (0.0625 if KIND == "int4" else 1.0)
    return pair * worth[None, None, :]


@triton.jit
def integer_gemv_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, columns_ptr, residual_ptr, out_ptr, num_rows, eps, flip,
    K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, SPLITS: tl.constexpr, TIMES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `quant_gemv_kernel`, with KIND "int4" or "int8", 16 words of a row in a tile, and `x` in bytes."""
    let_next_start(PDL)
    WORDS: tl.constexpr = 16
    ROWS: tl.constexpr = 16 // PARTS // (1 + GATED)
    NUM: tl.constexpr = K // 8 if KIND == "int4" else K // 4
    STEP: tl.constexpr = SPLITS * PARTS * WORDS
    BY_TILE: tl.constexpr = GROUP < K or KIND == "int4"
    LINES: tl.constexpr = ROWS * (1 + GATED)
    first, pieces = tl.program_id(0) * (ROWS * TIMES), ()
    words, factors = load_lines(
        word_ptr, scale_ptr, zero_ptr, first, num_rows, K, GROUP_ROWS, GROUP, ROWS, NUM, PARTS, SPLITS, WORDS, BY_TILE)  # fmt: skip
    scale = 1.0 if BY_TILE else load_row_scales(scale_ptr, first, num_rows, GROUP_ROWS, ROWS, LINES)
    wait_for_inputs(PDL)
    inverse = inverse_root(x_ptr, 0, eps, K, 1, 128 * SPLITS) if NORM else 1.0
    for c in tl.static_range(len(words) // 2):
        pieces += load_columns(x_ptr, columns_ptr, c * STEP, NUM, GROUP, KIND, PARTS, SPLITS, WORDS)
    xs, unit = planes_of(pieces, KIND)
    sums, units = sums_of(xs, zero_ptr is not None), units_of(unit, KIND)
    for i in tl.static_range(TIMES):
        if i + 1 < TIMES:
            next_words, next_factors = load_lines(
                word_ptr, scale_ptr, zero_ptr, first + ROWS, num_rows, K, GROUP_ROWS, GROUP, ROWS, NUM, PARTS, SPLITS, WORDS,
                BY_TILE)  # fmt: skip
            next_scale = 1.0 if BY_TILE else load_row_scales(scale_ptr, first + ROWS, num_rows, GROUP_ROWS, ROWS, LINES)
        residual = load_residual(residual_ptr, first, num_rows, ROWS, 1, 1) if RESIDUAL else 0.0
        y = sum_parts(multiply(words, factors, xs, sums, flip, KIND, SPLITS) * units, PARTS)
        y = tl.sum(tl.reshape(y, [LINES, 1, 2]), 2) * scale
        finish(y, residual, out_ptr, first, num_rows, inverse, GATED, 1)
        if i + 1 < TIMES:
            words, factors, scale, first = next_words, next_factors, next_scale, first + ROWS


MOST_TIMES = 5  # groups of lines of a program, which are unrolled
MOST_WARPS = 8
TILES = {"int4": 3, "int8": 8}  # of a warp, while there may be more warps
MOST_TILES = {"int4": 3, "int8": 10}  # of a warp: with more `quant_gemv` is faster (and `in_pairs` bears 16)
# Of a thread, and for each tile of a warp: few bytes or none go to a stack.
REGISTERS = {"int4": (-16, 48), "int8": (64, 13)}
INPUTS = {"int4": 128, "int8": 64}  # of a tile


def tiles_per_part(width: int, kind: str) -> int:
    """Return how many tiles each of the PARTS parts of a row of `width` inputs has."""
    return triton.cdiv(width, INPUTS[kind] * PARTS.value)


def can_handle(x: torch.Tensor, block: tuple[int, int], kind: str) -> bool:
    """Return whether `integer_gemv` can multiply these, and is fast: one token of 16 bits, groups of whole tiles, and rows that are not too long."""
    num_tokens, width = x.shape
    if kind not in INPUTS or x.itemsize != 2 or num_tokens > 1:
        return False
    has_tiles = block[1] % INPUTS[kind] == 0 or (kind == "int8" and block[1] >= width)
    return has_tiles and tiles_per_part(width, kind) <= MOST_WARPS * MOST_TILES[kind]


def kernel_config(lines: int, width: int, kind: str, num_sms: int) -> dict[str, int]:
    """Return SPLITS (which are warps) and TIMES of a program, and the most registers of a thread (`maxnreg`).

    All programs should be on the card's multiprocessors (`num_sms` of them) at once: those for which there is no room at
    first take as long again. What they need is registers, for the words and `x` of their tiles.
    """
    tiles = tiles_per_part(width, kind)
    splits = min(MOST_WARPS, triton.next_power_of_2(triton.cdiv(tiles, TILES[kind])))
    each = triton.cdiv(tiles, splits)
    base, for_tile = REGISTERS[kind]
    registers = max(64, base + for_tile * each) // 8 * 8
    room = num_sms * (65536 // (32 * splits * registers))
    times = min(MOST_TIMES, triton.cdiv(lines * PARTS.value, 16 * room))
    return {"SPLITS": splits, "TIMES": times, "maxnreg": registers}


def integer_gemv(
    x: torch.Tensor,
    weight: QuantizedWeight,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product of `quant_gemv` for one token of 16 bits, and groups of 128 (4 bits) or 64 (8 bits) inputs or a multiple."""
    width, words, kind = x.shape[1], weight.weight.view(torch.int32), kind_of(weight.weight)
    rows = len(words) // (1 + gated)
    out = x.new_empty(1, rows)
    tile = kernel_config(len(words), width, kind, num_sms(x.device))
    integer_gemv_kernel[(triton.cdiv(rows, 16 // PARTS.value // (1 + gated) * tile["TIMES"]),)](
        x, words, weight.scale, weight.zeros, columns, out if residual is None else residual, out, rows, norm_eps or 0.0,
        FLIP, K=width, GROUP_ROWS=weight.rows, GROUP=weight.columns, KIND=kind, NORM=norm_eps is not None, GATED=gated,
        RESIDUAL=residual is not None, **tile, num_warps=tile["SPLITS"],
        **launch_options(x.device, 1),
    )  # fmt: skip
    return out
