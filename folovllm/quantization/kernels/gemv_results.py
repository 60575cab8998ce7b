"""What comes before and after the products of codes with few tokens: a norm's factor, and from sums to outputs.

A row's scale and the residual are asked for before the products, so that nobody waits for them at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from folovllm.kernels.skinny_linear import silu_product
from folovllm.quantization.kernels.gemv_tiles import load_or_zero, row_of


@triton.jit
def inverse_root(x_ptr, stride_x, eps, K: tl.constexpr, M: tl.constexpr, AT_ONCE: tl.constexpr):
    """Of each token: one over the root mean square of its `x`, [1, M]."""
    row_ptr, squares = x_ptr + tl.arange(0, M)[:, None] * stride_x, tl.zeros([M, AT_ONCE], tl.float32)
    for start in tl.static_range(0, K, AT_ONCE):
        k = start + tl.arange(0, AT_ONCE)[None, :]
        x = load_or_zero(row_ptr + k, k < K, start + AT_ONCE <= K).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)[None, :]


@triton.jit
def sum_parts(acc, PARTS: tl.constexpr):
    """Of products [SPLITS, 16, columns] those of a part with itself, added up: [16 / PARTS lines, columns / PARTS]."""
    LINES: tl.constexpr = 16 // PARTS
    TOKENS: tl.constexpr = acc.shape[2] // PARTS
    met = tl.arange(0, 16)[:, None] // LINES == tl.arange(0, PARTS * TOKENS)[None, :] // TOKENS
    each = tl.reshape(tl.where(met, tl.sum(acc, 0), 0.0), [PARTS, LINES, PARTS, TOKENS])
    return tl.sum(tl.sum(each, 2), 0)


@triton.jit
def silu_times(y, DTYPE: tl.constexpr):
    """Lines of gate and then of up, [2 ROWS, TOKENS], as `silu_product` has them."""
    gate, up = tl.split(tl.permute(tl.reshape(y, [2, y.shape[0] // 2, y.shape[1]]), 1, 2, 0))
    return silu_product(gate, up, DTYPE)


@triton.jit
def load_row_scales(scale_ptr, first, num_rows, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr):
    """The scales of the lines from `first` on, [lines, 1], where a row has one."""
    line = row_of(first, tl.arange(0, LINES)[:, None], num_rows, ROWS, LINES)
    return tl.load(scale_ptr + line // GROUP_ROWS).to(tl.float32)


@triton.jit
def load_residual(residual_ptr, first, num_rows, ROWS: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr):
    """What is added to the outputs from `first` on, [ROWS, TOKENS]. To ask for it early saves the wait for it at the end."""
    outputs, token = first + tl.arange(0, ROWS)[:, None], tl.arange(0, TOKENS)[None, :]
    kept = (outputs < num_rows) & (token < M)
    return tl.load(residual_ptr + token * num_rows + outputs, mask=kept, other=0).to(tl.float32)


@triton.jit
def finish(y, residual, out_ptr, first, num_rows, inverse, GATED: tl.constexpr, M: tl.constexpr):
    """Store the outputs from `first` on, of sums [lines, tokens]."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    ROWS: tl.constexpr = y.shape[0] // (1 + GATED)
    y *= inverse
    y = silu_times(y, DTYPE) if GATED else y
    outputs, token = first + tl.arange(0, ROWS)[:, None], tl.arange(0, y.shape[1])[None, :]
    kept = (outputs < num_rows) & (token < M)
    tl.store(out_ptr + token * num_rows + outputs, (y + residual).to(DTYPE), mask=kept)
