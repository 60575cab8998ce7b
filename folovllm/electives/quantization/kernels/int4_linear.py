"""Codes of 4 bits times very few tokens: a quarter of the bytes of 16-bit weights, so a quarter of the time is the aim.

As in `skinny_linear`, a program asks for all its weights before it waits for its inputs. What is new is arithmetic: at four
times as many weights a second, unpacking them is what could take too long. So

- a code becomes a float without a conversion, and mostly without a shift (`code`);
- a group's scale and zero meet sums, not weights: sum(x s (c - z)) is s sum(x (c - 8)) + s (8 - z) sum(x);
- a program has several rows of weights, which share each piece of `x` and its sum.

Words are in the order of `quantization.packing.pack_planes`. Four neighbouring words, a quad, are the 16 bytes that a
thread reads at once, and lie within one group; their codes i meet four neighbouring inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.skinny_linear import add_products, add_squares, append, repeat, silu_product, total_rows

IN_QUAD = 32  # codes


@triton.jit
def code(words, i: tl.constexpr, exponent):
    """Code i of each word, less 8, as float32: exact.

    The 23 bits of a float32's fraction count steps of 2 ** (n - 23) from 2 ** n on. With n = 23 - 4 i, its bits 4 i to
    4 i + 3 count ones: a code that is masked where it lies, and put below that exponent, is the float 2 ** n + code.
    The upper three codes lie beyond those bits, and come down first. `exponent` is that of 2 ** 23, in its place; were it
    a constant, mask and exponent would be two constants in one operation, which is then made two.
    """
    PLACE: tl.constexpr = i % 5
    if i >= 5:
        words = words >> 20
    bits = (words & (15 << 4 * PLACE)) | (exponent - (4 * PLACE << 23))
    return bits.to(tl.float32, bitcast=True) - ((1 << 23 - 4 * PLACE) + 8)


@triton.jit
def zeros(NUM: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """NUM tiles [A, B, C] of sums that begin."""
    return repeat(tl.zeros([A, B, C], tl.float32), NUM)


@triton.jit
def load_words(row_ptr, quads, NUM: tl.constexpr):
    """All words of some rows, in tiles [rows, quads, 4]. Each is read once, so it leaves the caches to `x` (`evict_first`)."""
    tiles = ()
    for start in tl.static_range(0, NUM, quads.shape[1]):
        ptr = row_ptr + 4 * (start + quads) + tl.arange(0, 4)[None, None, :]
        tiles = append(tiles, tl.load(ptr, mask=start + quads < NUM, other=0, eviction_policy="evict_first"))
    return tiles


@triton.jit
def first_inputs(quads, groups, GROUP: tl.constexpr):
    """Which inputs codes 0 of these quads meet, [1, quads, 4]. Codes i meet those that are i * GROUP / 8 further on."""
    return (groups * GROUP + 4 * (quads % (GROUP // 32)))[:, :, None] + tl.arange(0, 4)[None, None, :]


@triton.jit
def load_tokens(x_ptr, stride_x, inside, M: tl.constexpr):
    """Of each token the numbers at `x_ptr`, as float32; zeros where the row has ended."""
    tiles = ()
    for m in tl.static_range(M):
        tiles = append(tiles, tl.load(x_ptr + m * stride_x, mask=inside, other=0).to(tl.float32))
    return tiles


@triton.jit
def load_scales(scale_ptr, zero_ptr, at, inside):
    """Two factors of each group: that of the sum of x times codes less 8, and that of the sum of x."""
    scale = tl.load(scale_ptr + at, mask=inside, other=0).to(tl.float32)
    offset = scale
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
        # Either the code that means zero, or what code 0 stands for.
        offset = (8 - zero) * scale if zero_ptr.dtype.element_ty == tl.uint8 else zero + 8 * scale
    return scale, offset


@triton.jit
def add_all(sums, xs):
    """Of each token: the sum so far, and `x`."""
    result = ()
    for m in tl.static_range(len(xs)):
        result = append(result, sums[m] + xs[m])
    return result


@triton.jit
def times(xs, factor):
    """Of each token: `x` times factors that are the same for all."""
    result = ()
    for m in tl.static_range(len(xs)):
        result = append(result, xs[m] * factor)
    return result


@triton.jit
def multiply_chunk(
    words, x_ptr, columns_ptr, stride_x, inside, squares, exponent, GROUP: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """A chunk of words [lines, quads, 4] meets each token's inputs; `x_ptr` and `columns_ptr` are at those of codes 0.

    Returns, of each token: sums of x times codes less 8 [lines, quads, 4], sums of x [1, quads, 4]; and `squares` with
    those of x before it is multiplied by columns, if NORM.
    """
    LINES: tl.constexpr = words.shape[0]
    sums, x_sums = zeros(len(squares), LINES, words.shape[1], 4), zeros(len(squares), 1, words.shape[1], 4)
    for i in tl.static_range(8):
        step = i * (GROUP // 8)
        xs = load_tokens(x_ptr + step, stride_x, inside, len(squares))
        if NORM:
            squares = add_squares(squares, xs, tl.float32)
        if columns_ptr is not None:
            xs = times(xs, tl.load(columns_ptr + step, mask=inside, other=0).to(tl.float32))
        sums = add_products(sums, code(words, i, exponent), xs, tl.float32)
        x_sums = add_all(x_sums, xs)
    return sums, x_sums, squares


@triton.jit
def add_scaled(totals, sums, scale):
    """Of each token: the total so far, and these quads, [rows, quads]."""
    result = ()
    for m in tl.static_range(len(sums)):
        result = append(result, totals[m] + scale * tl.sum(sums[m], 2))
    return result


@triton.jit
def int4_linear_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, columns_ptr, residual_ptr, out_ptr, stride_x, num_rows, eps, exponent,
    K: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr, QUADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: outputs p * ROWS to p * ROWS + ROWS of all M tokens, QUADS quads of each row at a time.

    NORM, GATED and RESIDUAL as in `skinny_linear_kernel`. GATED: the program's lines are its rows of gate, then those of up.
    With `columns_ptr`, `x` is multiplied by these [K]; a norm's mean is that of `x` before it.
    """
    let_next_start(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    NUM: tl.constexpr = K // 32  # quads of a row
    LINES: tl.constexpr = 2 * ROWS if GATED else ROWS
    first, line = tl.program_id(0) * ROWS, tl.arange(0, LINES)
    rows = tl.minimum(first + line % ROWS, num_rows - 1) + line // ROWS * num_rows  # past the last one that again
    quads = tl.arange(0, QUADS)[None, :]
    words = load_words(word_ptr + rows[:, None, None].to(tl.int64) * (4 * NUM), quads[:, :, None], NUM)
    wait_for_inputs(PDL)
    totals, squares = repeat(tl.zeros([LINES, QUADS], tl.float32), M), zeros(M, 1, QUADS, 4)
    for c in tl.static_range(len(words)):
        quad = c * QUADS + quads
        group, inside = quad // (GROUP // 32), quad < NUM
        inputs = first_inputs(quad, group, GROUP)
        sums, x_sums, squares = multiply_chunk(
            words[c], x_ptr + inputs, None if columns_ptr is None else columns_ptr + inputs, stride_x,
            inside[:, :, None], squares, exponent, GROUP, NORM
        )  # fmt: skip
        scale, offset = load_scales(scale_ptr, zero_ptr, rows[:, None] * (K // GROUP) + group, inside)
        totals = add_scaled(totals, sums, scale)
        if zero_ptr is not None:
            totals = add_scaled(totals, x_sums, offset)
    outputs, results = first + tl.arange(0, ROWS), total_rows(totals)
    kept = outputs < num_rows
    for m in tl.static_range(M):
        y = results[m]
        if NORM:
            y *= tl.rsqrt(tl.sum(tl.sum(squares[m], 2), 1) / K + eps)  # [1], of the one row of x
        if GATED:
            half, pair = tl.arange(0, 2)[:, None], y.reshape(2, ROWS)
            y = silu_product(tl.sum(tl.where(half == 0, pair, 0), 0), tl.sum(tl.where(half == 1, pair, 0), 0), DTYPE)
        if RESIDUAL:
            y += tl.load(residual_ptr + m * num_rows + outputs, mask=kept, other=0).to(tl.float32)
        tl.store(out_ptr + m * num_rows + outputs, y.to(DTYPE), mask=kept)


EXPONENT = (127 + 23) << 23
REGISTERS = 80  # of weights, in each thread
MANY_ROWS = 4096


def kernel_config(num_tokens: int, num_rows: int, width: int, gated: bool) -> tuple[int, int, int]:
    """Return (warps, outputs, quads of a row that are read at a time) of a program.

    Eight lines share each piece of `x`; fewer where eight would leave too few programs, or too few registers to the sums
    of more tokens. As many warps share the lines as REGISTERS asks for, and each thread reads a quad at a time.
    """
    lines = 8 if num_rows * (1 + gated) >= MANY_ROWS and num_tokens == 1 else 4
    num_warps = min(8, triton.next_power_of_2(triton.cdiv(lines * width // 8, REGISTERS * 32)))
    return num_warps, lines // (1 + gated), 32 * num_warps


def int4_linear(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x` [T, K] times the transpose of W [rows, K], for T in FEW; accumulated in float32.

    Args:
        words: [rows, K / 8] int32, in the order of `pack_planes`; of 32 inputs or a multiple of that is each group.
        scales: [rows, groups], floats.
        zeros: [rows, groups]: uint8 codes that mean zero, or floats that code 0 stands for; without, code 8 means zero.
        norm_eps, gated, residual: as in `skinny_linear`. Rows of `x` may be apart; nothing else is.
        columns: [K], factors of the (normed) `x`.
    """
    num_tokens, width = x.shape
    rows = len(words) // 2 if gated else len(words)
    out = x.new_empty(num_tokens, rows)
    num_warps, per_program, quads = kernel_config(num_tokens, rows, width, gated)
    int4_linear_kernel[(triton.cdiv(rows, per_program),)](
        x, words, scales, zeros, columns, out if residual is None else residual, out, x.stride(0), rows, norm_eps or 0.0,
        EXPONENT, K=width, GROUP=width // scales.shape[1], NORM=norm_eps is not None, GATED=gated, RESIDUAL=residual is not None,
        M=num_tokens, ROWS=per_program, QUADS=min(quads, triton.next_power_of_2(width // IN_QUAD)), num_warps=num_warps,
        **launch_options(x.device, num_tokens),
    )  # fmt: skip
    return out
