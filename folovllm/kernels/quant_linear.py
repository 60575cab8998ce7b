"""Weights that are codes of 8 bits times scales, and their product with very few rows.

`small_linear` for codes: there are half as many bytes to read, and more to do for each of them. So the tile of a program is
[rows, units, 4]. A thread holds whole units: 8 bytes of weights and 16 of `x`, each of which it reads at once. Codes travel
in pairs, as int16, for the two inputs that belong to them are an int32 of `x`. So both tiles have four elements a thread, and
what meets is in the same thread from the start: with units of 16 bytes of weights, Triton gave the two tiles different threads,
and every code went through a shuffle. A unit's products are added up within a thread, so a scale, which all of a unit
share, costs one product for 8. What is the same for all rows, `x` unpacked, is made once: [1, units, 4].

To add another kind of codes: a branch of `unpack_pair` (whatever holds the codes of two neighbouring inputs, so a byte with
4 bits each), one of `unpack` in `quant_matmul.py`, and a dtype in `kind_of`. Zero points would be subtracted
where the scale is multiplied: by what `x` sums up to over a unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from folovllm.kernels.fp8 import INTERPRETED
from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.small_linear import MAX_WARPS, append, halves, total_rows

UNIT = 8  # codes that a thread reads at once; a scale is for whole units
FEW = (1, 2, 4)  # tokens; above, the tensor cores are better (`quant_matmul`)


@dataclass(frozen=True, slots=True)
class Codes:
    """W [outputs, inputs]: `weight`, of FP8 (E4M3) or int8, times `scale` of the block it lies in.

    `scale` is float32 [outputs / rows, inputs / columns], and `columns` a multiple of UNIT. Experts may be in 4 bits, too:
    `weight` is then int32, scales are any floats, and `zeros` [outputs, inputs / columns] as `int4_linear` has them.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    rows: int
    columns: int
    zeros: torch.Tensor | None = None


# One instruction for both, to float16, which holds all of FP8; then one for each.
PAIR_OF_FP8 = tl.constexpr("""{ .reg .b16 low, high; .reg .b32 both;
    cvt.rn.f16x2.e4m3x2 both, $2;
    mov.b32 {low, high}, both;
    cvt.f32.f16 $0, low;
    cvt.f32.f16 $1, high; }""")


@triton.jit
def unpack_pair(pair, KIND: tl.constexpr):
    """The codes of two neighbouring inputs, an int16, as float32."""
    if KIND == "fp8" and INTERPRETED:
        low = (pair & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        high = ((pair >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND == "fp8":
        low, high = tl.inline_asm_elementwise(PAIR_OF_FP8, "=f,=f,h", [pair], (tl.float32, tl.float32), True, 1)
    elif KIND == "fp8_bits":  # the bits of a float16 whose exponent counts from another number: 8 less
        low = (((pair & 0x80) << 8) | ((pair & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        high = ((pair & -0x8000) | ((pair >> 1) & 0x3F80)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        low, high = ((pair << 8) >> 8).to(tl.float32), (pair >> 8).to(tl.float32)
    return low, high


@triton.jit
def load_x(x_ptr, at, mask, DTYPE: tl.constexpr):
    """The inputs of pairs `at` as float32, those with even and those with odd numbers. Pairs of 16 bits are an int32."""
    if x_ptr.dtype.element_ty == tl.int32:
        low, high = halves(tl.load(x_ptr + at, mask=mask, other=0), DTYPE)
    else:
        low = tl.load(x_ptr + 2 * at, mask=mask, other=0).to(tl.float32)
        high = tl.load(x_ptr + 2 * at + 1, mask=mask, other=0).to(tl.float32)
    return low, high


@triton.jit
def load_codes(
    weight_ptr, scale_ptr, rows, units, four, K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr
):
    """All codes of some rows, chunk by chunk; and the scales of their units, if an output has more than one."""
    codes, scales = (), ()
    for start in tl.static_range(0, K // 8, units.shape[1]):
        inside = units + start < K // 8
        row_ptr = weight_ptr + rows[:, None, None].to(tl.int64) * (K // 2) + (start + units) * 4 + four
        codes = append(codes, tl.load(row_ptr, mask=inside, other=0, eviction_policy="evict_first"))
        if GROUP < K:
            scale_rows = (rows // GROUP_ROWS)[:, None, None] * tl.cdiv(K, GROUP)
            if start * 8 % GROUP == 0:  # the same addresses for each chunk, but for a constant
                at = scale_rows + units * 8 // GROUP + start * 8 // GROUP
            else:
                at = scale_rows + (units + start) * 8 // GROUP
            scales = append(scales, tl.load(scale_ptr + at, mask=inside, other=0.0))
    return codes, scales


@triton.jit
def add_units(sums, pair, xs, scales, c: tl.constexpr, KIND: tl.constexpr):
    """Of each token: the sums so far [rows, units, 1], and this chunk's."""
    low, high = unpack_pair(pair, KIND)
    result = ()
    for m in tl.static_range(len(sums)):
        of_unit = tl.sum(low * xs[2 * m], 2, keep_dims=True) + tl.sum(high * xs[2 * m + 1], 2, keep_dims=True)
        if len(scales) > 0:
            of_unit *= scales[c]
        result = append(result, sums[m] + of_unit)
    return result


@triton.jit
def row_totals(sums):
    """Of each token: the sums of its rows, [rows]."""
    result = ()
    for m in tl.static_range(len(sums)):
        result = append(result, tl.reshape(sums[m], [sums[m].shape[0], sums[m].shape[1]]))
    return total_rows(result)


@triton.jit
def quant_linear_kernel(
    x_ptr, weight_ptr, scale_ptr, columns_ptr, residual_ptr, out_ptr, stride_x, num_rows, eps, K: tl.constexpr,
    GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, COLUMNS: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program p: outputs p * ROWS to p * ROWS + ROWS of all M tokens, as `small_linear_kernel`. A chunk is CHUNK units.

    GROUP_ROWS outputs and GROUP inputs share a scale; with GROUP = K it is multiplied last. COLUMNS: `x` is multiplied by
    these [K], which are there from the start as weights are; a norm's mean is that of `x` before it.
    """
    let_next_start(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = outputs < num_rows
    rows = tl.minimum(outputs, num_rows - 1)  # what is past the last row reads that again, and is not stored
    units, four = tl.arange(0, CHUNK)[None, :, None], tl.arange(0, 4)[None, None, :]
    codes, scales = load_codes(weight_ptr, scale_ptr, rows, units, four, K, GROUP_ROWS, GROUP)
    if GATED:
        up_codes, up_scales = load_codes(weight_ptr, scale_ptr, rows + num_rows, units, four, K, GROUP_ROWS, GROUP)
    wait_for_inputs(PDL)
    sums, squares = (), ()
    for _ in tl.static_range(M):
        sums = append(sums, tl.zeros([ROWS, CHUNK, 1], tl.float32))
        squares = append(squares, tl.zeros([1, CHUNK, 1], tl.float32))
    up_sums = sums
    for c in tl.static_range(len(codes)):
        at = (units + c * CHUNK) * 4 + four  # of pairs
        inside = units + c * CHUNK < K // 8
        if COLUMNS:
            low_factor, high_factor = load_x(columns_ptr, at, inside, DTYPE)
        xs, new_squares = (), ()
        for m in tl.static_range(M):
            low, high = load_x(x_ptr + m * stride_x, at, inside, DTYPE)
            if NORM:
                new_squares = append(new_squares, squares[m] + tl.sum(low * low + high * high, 2, keep_dims=True))
            if COLUMNS:
                low, high = low * low_factor, high * high_factor
            xs = append(append(xs, low), high)
        if NORM:
            squares = new_squares
        sums = add_units(sums, codes[c], xs, scales, c, KIND)
        if GATED:
            up_sums = add_units(up_sums, up_codes[c], xs, up_scales, c, KIND)
    totals, up_totals, square_totals = row_totals(sums), row_totals(up_sums), row_totals(squares)
    scale, up_scale = 1.0, 1.0
    if GROUP >= K:
        scale = tl.load(scale_ptr + rows // GROUP_ROWS)
        if GATED:
            up_scale = tl.load(scale_ptr + (rows + num_rows) // GROUP_ROWS)
    for m in tl.static_range(M):
        inverse = tl.rsqrt(square_totals[m] / K + eps) if NORM else 1.0
        y = totals[m] * scale * inverse
        if GATED:
            gate, up = y.to(DTYPE).to(tl.float32), (up_totals[m] * up_scale * inverse).to(DTYPE).to(tl.float32)
            y = (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32) * up
        if RESIDUAL:
            y += tl.load(residual_ptr + m * num_rows + outputs, mask=kept, other=0).to(tl.float32)
        tl.store(out_ptr + m * num_rows + outputs, y.to(DTYPE), mask=kept)


REGISTERS = {1: 80, 2: 80, 4: 48}  # of codes, in each thread, by the number of tokens, whose sums take some too


def tile_of(num_tokens: int, width: int, gated: bool) -> tuple[int, int, int]:
    """(warps, rows, units of a row that are read at a time) of a program.

    There is as much to do for a piece of `x`, which must be unpacked and normed, as for a row of codes, and twice as much to
    read, from a nearer cache. So it serves four rows, of which gate and up are two.
    """
    rows = 4 // (1 + gated)
    warps = min(MAX_WARPS, triton.next_power_of_2(triton.cdiv(4 * width, 4 * 32 * REGISTERS[num_tokens])))
    return warps, rows, min(32 * warps, triton.next_power_of_2(width // UNIT))


def quant_linear(
    x: torch.Tensor,
    codes: Codes,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x` [T, inputs], for T in FEW, times the transpose of W; accumulated in float32.

    `norm_eps`, `gated` and `residual` as of `small_linear`. With `columns` [inputs], the (normed) `x` is multiplied by them
    first. Rows of `x` begin at even numbers, and inputs are a multiple of UNIT.
    """
    num_tokens, width = x.shape
    rows = len(codes.weight) // 2 if gated else len(codes.weight)
    out = x.new_empty(num_tokens, rows)
    num_warps, per_program, units = tile_of(num_tokens, width, gated)
    factors = columns
    if x.itemsize == 2:
        x, factors = x.view(torch.int32), None if columns is None else columns.view(torch.int32)
    quant_linear_kernel[(triton.cdiv(rows, per_program),)](
        x, codes.weight.view(torch.int16), codes.scale, x if factors is None else factors,
        out if residual is None else residual, out, x.stride(0), rows, norm_eps or 0.0,
        K=width, GROUP_ROWS=codes.rows, GROUP=codes.columns, KIND=kind_of(codes.weight), NORM=norm_eps is not None,
        COLUMNS=columns is not None, GATED=gated, RESIDUAL=residual is not None, M=num_tokens, ROWS=per_program,
        CHUNK=units, num_warps=num_warps,
        **launch_options(x.device, num_tokens),
    )  # fmt: skip
    return out


def kind_of(weight: torch.Tensor) -> str:
    """How a kernel unpacks these codes."""
    if weight.dtype in (torch.int8, torch.int32):
        return "int8" if weight.dtype == torch.int8 else "int4"
    return "fp8" if has_fp8(weight.device) else "fp8_bits"


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether the hardware turns FP8 into other floats (compute capability 8.9 or later). Triton's interpreter does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
