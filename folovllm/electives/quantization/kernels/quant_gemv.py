"""Weights in codes of 8 or 4 bits times very few tokens, on the tensor cores.

Codes are read in half or a quarter of the time of 16-bit weights, and what is then done with each takes as long. To multiply
and add is most of that, with more than one token. A tensor core does 2,048 of these in one instruction, of floats of 16 bits;
so all that is left is to make such floats (`unpack_codes`). Three things make it fit:

- **No number moves to another thread.** A tensor core wants certain elements in certain threads. But a sum may be taken in any
  order. So what a thread has read, 16 neighbouring bytes, is given to the tensor core as if it were what that thread should
  have, and `x` is read in the same order.
- **No idle corner.** The smallest product is 16 rows of weights times 8 tokens. With one token four rows are enough:
  PARTS = 4 quarters of their inputs are 16 rows, and the quarters of `x` are 8 columns. Of the 16 x 8 results those count
  where a part has met its own. So programs stay small, and there are many of them.
- **Warps share rows.** Of SPLITS warps each has every SPLITS-th tile of inputs, as in a batch of products. Their sums meet
  at the end.

As in `skinny_linear`, a program asks for weights before it waits for its inputs. A scale meets the sum of a tile's products,
or of all where a row has one scale.

Codes that are integers meet one token in integers (`integer_gemv`), where that is faster.

FP8 becomes float16 in one instruction for two codes, bfloat16 in five. So with one token `x` becomes float16 too, which is
long: a program keeps it in registers, and has several groups of lines, one after the other (TIMES). What else was tried,
and why these products still take longer than their bytes, is in `docs/performance_log.md`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.electives.quantization.kernels.gemv_tiles import (
    as_codes,
    as_halves,
    finish,
    inverse_root,
    load_lines,
    load_residual,
    load_row_scales,
    load_tile,
    sixteen,
    sum_parts,
)
from folovllm.electives.quantization.kernels.int4_linear import EXPONENT
from folovllm.electives.quantization.kernels.integer_gemv import can_handle, integer_gemv
from folovllm.electives.quantization.weight import QuantizedWeight, kind_of
from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.skinny_linear import append


@triton.jit
def add_products(acc, numbers, x, factors, PRECISION: tl.constexpr):
    """Sums [SPLITS, 16, 8] and the products of numbers [SPLITS, 16, n] with `x` [SPLITS, n, 8], times a tile's own factors."""
    if len(factors) == 0:
        acc = tl.dot(numbers, x, acc, input_precision=PRECISION)
    else:
        acc += tl.dot(numbers, x, input_precision=PRECISION) * factors[0][:, :, None]
    if len(factors) == 2:  # there are zeros
        acc += tl.dot(tl.full(numbers.shape, 1.0, x.dtype), x, input_precision=PRECISION) * factors[1][:, :, None]
    return acc


@triton.jit
def quant_gemv_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, columns_ptr, residual_ptr, out_ptr, stride_x, num_rows, eps, exponent,
    K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr,
    TIMES: tl.constexpr, HALVES: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: outputs p * ROWS * TIMES to (p + 1) * ROWS * TIMES of all M tokens, ROWS at a time. HALVES: `x` in float16.
    ROUND, with HALVES: `x` is rounded to E4M3, with scales for GROUP inputs, which every program finds for itself.

    NORM, GATED and RESIDUAL as in `skinny_linear_kernel`. GATED: the lines are ROWS rows of gate, then those of up.
    GROUP_ROWS outputs and GROUP inputs share a scale; with GROUP = K it is multiplied last, unless there are zeros.
    """
    let_next_start(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if DTYPE == tl.float32 else "tf32"  # noqa: SIM300
    ROWS: tl.constexpr = 16 // PARTS // (1 + GATED)
    NUM: tl.constexpr = K // 8 if KIND == "int4" else K // 4
    STEP: tl.constexpr = SPLITS * PARTS * WORDS
    BY_TILE: tl.constexpr = GROUP < K or zero_ptr is not None
    LINES: tl.constexpr = ROWS * (1 + GATED)
    first, xs = tl.program_id(0) * (ROWS * TIMES), ()
    words, factors = load_lines(
        word_ptr, scale_ptr, zero_ptr, first, num_rows, K, GROUP_ROWS, GROUP, ROWS, NUM, PARTS, SPLITS, WORDS, BY_TILE)  # fmt: skip
    scale = 1.0 if BY_TILE else load_row_scales(scale_ptr, first, num_rows, GROUP_ROWS, ROWS, LINES)
    wait_for_inputs(PDL)
    inverse = inverse_root(x_ptr, stride_x, eps, K, M, 256 * SPLITS // M) if NORM else 1.0
    for c in tl.static_range(len(words) // 2 if HALVES else 0):
        xs = append(xs, load_tile(x_ptr, columns_ptr, stride_x, c * STEP, NUM, GROUP, KIND, M, PARTS, SPLITS, WORDS))
    if HALVES:
        if ROUND:
            xs, peaks = as_codes(xs, GROUP, PARTS)
        else:
            xs, peak = as_halves(xs)
            peaks = (peak,)
    for i in tl.static_range(TIMES):
        if i + 1 < TIMES:
            next_words, next_factors = load_lines(
                word_ptr, scale_ptr, zero_ptr, first + ROWS, num_rows, K, GROUP_ROWS, GROUP, ROWS, NUM, PARTS, SPLITS, WORDS,
                BY_TILE)  # fmt: skip
            next_scale = 1.0 if BY_TILE else load_row_scales(scale_ptr, first + ROWS, num_rows, GROUP_ROWS, ROWS, LINES)
        residual = load_residual(residual_ptr, first, num_rows, ROWS, 8 // PARTS, M) if RESIDUAL else 0.0
        acc = tl.zeros([SPLITS, 16, 8], tl.float32)
        for c in tl.static_range(len(words) // 2):
            x = xs[c] if HALVES else load_tile(
                x_ptr, columns_ptr, stride_x, c * STEP, NUM, GROUP, KIND, M, PARTS, SPLITS, WORDS)  # fmt: skip
            numbers = sixteen(words[2 * c], words[2 * c + 1], exponent, KIND, x.dtype)
            if ROUND and BY_TILE:
                acc += tl.dot(numbers, x) * (factors[c][0][:, :, None] * peaks[c])
            else:
                acc = add_products(acc, numbers, x, factors[c] if BY_TILE else (), PRECISION)
        if HALVES and not (ROUND and BY_TILE):
            acc *= peaks[0]
        y = sum_parts(acc, PARTS) * scale
        finish(y, residual, out_ptr, first, num_rows, inverse, GATED, M)
        if i + 1 < TIMES:
            words, factors, scale, first = next_words, next_factors, next_scale, first + ROWS


def is_supported(x: torch.Tensor) -> bool:
    """Return whether the device of `x` keeps such a product in registers: compute capability 8.0 or later, or an interpreter."""
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0)


def can_round(x: torch.Tensor, group: int | None) -> bool:
    """Return whether `quant_gemv` rounds `x` and is the fastest way: one token, since every program rounds all inputs."""
    return len(x) == 1 and x.shape[1] <= MOST_ROUNDED and group in (None, 128) and is_supported(x)


FEW = (1, 2, 4)  # tokens; above, `quant_matmul` is faster
MOST_ROUNDED = 8192  # inputs: every program rounds them all, and for longer rows a kernel that rounds once is faster
REGISTERS = 84  # of codes, in each thread
MAX_WARPS = 16
PROGRAMS = 600
MOST_TIMES = 4  # groups of lines of a program: they are unrolled, and eight took the compiler 9 s
MOST_BYTES = 320  # of a row, in a part of a warp, where `x` stays in registers


def kernel_config(num_tokens: int, rows: int, row_bytes: int, group_bytes: int, halves: bool) -> dict[str, int]:
    """Return PARTS, SPLITS (which are warps), WORDS, TIMES and HALVES of a program, for rows of so many bytes, and groups that share a scale.

    As many parts as leave a column to each token, but four rows. As many warps as REGISTERS asks for; two at least where
    the sums of four tokens take registers too. If `x` becomes float16, each part of a warp has up to MOST_BYTES; and so that
    this is done less often, a program has several groups of lines, while there are PROGRAMS.
    """
    parts, times = 2 if num_tokens > 2 else 4, 1
    splits = max(triton.next_power_of_2(triton.cdiv(16 // parts * row_bytes, 4 * 32 * REGISTERS)), 1 + (num_tokens > 2))
    if halves:
        pieces = triton.next_power_of_2(triton.cdiv(row_bytes, MOST_BYTES))
        parts = 8 if pieces > 8 else 4
        splits = max(1, pieces // parts)
        times = 1 << max(0, min(MOST_TIMES, rows * parts // (16 * PROGRAMS)).bit_length() - 1)
    words = min(16, (group_bytes & -group_bytes) // 4)
    return {"PARTS": parts, "SPLITS": min(MAX_WARPS, splits), "WORDS": words, "TIMES": times, "HALVES": halves}


def quant_gemv(
    x: torch.Tensor,
    weight: QuantizedWeight,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    rounds: bool = False,
) -> torch.Tensor:
    """`x` [T, K] times the transpose of W, for T in FEW; accumulated in float32.

    Args:
        norm_eps, gated, residual: as in `skinny_linear`. Rows of `x` may be apart; nothing else is.
        columns: [K], factors of the (normed) `x`. Their product is rounded to its dtype.
        rounds: `x` is rounded to E4M3, as `quantize_rows` does it, with a scale for the token or for groups like the weights'.
            Where `can_round` says so.
    """
    words, block, kind = weight.weight.view(torch.int32), (weight.rows, weight.columns), kind_of(weight.weight)
    if can_handle(x, block, kind):
        return integer_gemv(x, weight, norm_eps, gated, residual, columns)
    num_tokens, width = x.shape
    rows = len(words) // (1 + gated)
    out = x.new_empty(num_tokens, rows)
    row_bytes = 4 * words.shape[1]
    has_groups = block[1] < width or kind == "int4"
    halves = rounds or (kind == "fp8" and num_tokens == 1 and x.itemsize == 2)
    tile = kernel_config(num_tokens, len(words), row_bytes, row_bytes * block[1] // width if has_groups else 64, halves)
    quant_gemv_kernel[(triton.cdiv(rows, 16 // tile["PARTS"] // (1 + gated) * tile["TIMES"]),)](
        x, words, weight.scale, weight.zeros, columns, out if residual is None else residual, out, x.stride(0), rows,
        norm_eps or 0.0, EXPONENT, K=width, GROUP_ROWS=block[0], GROUP=block[1], KIND=kind, NORM=norm_eps is not None, GATED=gated,
        RESIDUAL=residual is not None, M=num_tokens, ROUND=rounds, **tile, num_warps=tile["SPLITS"],
        **launch_options(x.device, num_tokens),
    )  # fmt: skip
    return out
