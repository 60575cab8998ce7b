"""Codes of 8 or 4 bits that are integers, times one token: on the tensor cores, in integers.

What `quant_gemv` spends most instructions on is to make floats of codes. Here codes are bytes as they come, or one instruction
away from that (`byte_planes`), and a tensor core takes 32 of a row at once in place of 16. `x` becomes integers instead: four
bytes of each number are four columns of a product. That is long. So a program keeps `x` in registers, and takes several
groups of lines one after the other (TIMES).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.multiprocessors import num_sms
from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.skinny_linear import append
from folovllm.quantization.kernels.byte_planes import FLIP, in_pairs, load_columns, planes_of, sixteen_bytes
from folovllm.quantization.kernels.gemv_tiles import (
    finish,
    inverse_root,
    load_lines,
    load_residual,
    load_row_scales,
    sum_parts,
)
from folovllm.quantization.weight import QuantizedWeight, kind_of

PARTS = tl.constexpr(2)  # of a row: four columns each


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


def tiles_of(width: int, kind: str) -> int:
    """Tiles of a part of a row."""
    return triton.cdiv(width, INPUTS[kind] * PARTS.value)


def takes(x: torch.Tensor, block: tuple[int, int], kind: str) -> bool:
    """Whether `integer_gemv` is for these: one token of 16 bits, groups of whole tiles, and rows that are not too long."""
    num_tokens, width = x.shape
    if kind not in INPUTS or x.itemsize != 2 or num_tokens > 1:
        return False
    has_tiles = block[1] % INPUTS[kind] == 0 or (kind == "int8" and block[1] >= width)
    return has_tiles and tiles_of(width, kind) <= MOST_WARPS * MOST_TILES[kind]


def tile_of(lines: int, width: int, kind: str, num_sms: int) -> dict[str, int]:
    """SPLITS (which are warps) and TIMES of a program, and the most registers of a thread (`maxnreg`).

    All programs should be on the card's multiprocessors (`num_sms` of them) at once: those for which there is no room at
    first take as long again. What they need is registers, for the words and `x` of their tiles.
    """
    tiles = tiles_of(width, kind)
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
    """As `quant_gemv`, for one token of 16 bits, and groups of 128 (4 bits) or 64 (8 bits) inputs or a multiple."""
    width, words, kind = x.shape[1], weight.weight.view(torch.int32), kind_of(weight.weight)
    rows = len(words) // (1 + gated)
    out = x.new_empty(1, rows)
    tile = tile_of(len(words), width, kind, num_sms(x.device))
    integer_gemv_kernel[(triton.cdiv(rows, 16 // PARTS.value // (1 + gated) * tile["TIMES"]),)](
        x, words, weight.scale, weight.zeros, columns, out if residual is None else residual, out, rows, norm_eps or 0.0,
        FLIP, K=width, GROUP_ROWS=weight.rows, GROUP=weight.columns, KIND=kind, NORM=norm_eps is not None, GATED=gated,
        RESIDUAL=residual is not None, **tile, num_warps=tile["SPLITS"],
        **launch_options(x.device, 1),
    )  # fmt: skip
    return out
