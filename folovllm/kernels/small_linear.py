"""Matrix times very few rows: what the layers of a decode are at batch 1 to 4.

There is nothing to compute here, only weights to read. Libraries tune their kernels for larger batches and leave half of
the bandwidth unused; this one gives every program a few rows of the weight and reads each exactly once, in long runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.pdl import launch_options, wait_for_inputs

MAX_TOKENS = 4  # above, the library's matrix product is better
WIDTH = 512  # elements of a row that are read at a time


@triton.jit
def small_linear_kernel(
    x_ptr, weight_ptr, residual_ptr, out_ptr, stride_x, num_rows, eps, K: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program p: outputs p * N to p * N + N of all M tokens. The first weights are under way before the inputs are there.

    NORM: x is divided by its root mean square, after the product; every program takes the mean anew, which costs less
    than a kernel that does it once. GATED: the weight is gate and up stacked, `num_rows` rows each, and the output
    silu(gate) * up, both rounded before they meet. RESIDUAL: [M, num_rows], added.
    """
    rows = tl.program_id(0) * N + tl.arange(0, N)
    keep = rows < num_rows
    tokens = tl.arange(0, M)
    y = tl.zeros([M, N, WIDTH], tl.float32)
    up = tl.zeros([M, N, WIDTH], tl.float32)
    squares = tl.zeros([M, WIDTH], tl.float32)
    for start in tl.static_range(0, K, WIDTH):
        k = start + tl.arange(0, WIDTH)
        mask = keep[:, None] & (k < K)[None, :]
        row = weight_ptr + rows.to(tl.int64)[:, None] * K + k[None, :]
        w = tl.load(row, mask=mask, other=0.0)
        if GATED:
            w_up = tl.load(row + tl.cast(num_rows, tl.int64) * K, mask=mask, other=0.0)
        if start == 0:
            wait_for_inputs(PDL)
        x = tl.load(x_ptr + tokens[:, None] * stride_x + k[None, :], mask=(k < K)[None, :], other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
        y += x[:, None, :] * w[None, :, :].to(tl.float32)
        if GATED:
            up += x[:, None, :] * w_up[None, :, :].to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    result = tl.sum(y, 2)
    factor = tl.sum(up, 2)
    if NORM:
        inverse = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        result *= inverse
        factor *= inverse
    if GATED:
        gate = result.to(dtype).to(tl.float32)
        result = (gate / (1.0 + tl.exp(-gate))).to(dtype) * factor.to(dtype)
    at = tokens[:, None] * num_rows + rows[None, :]
    if RESIDUAL:
        result += tl.load(residual_ptr + at, mask=keep[None, :], other=0.0)
    tl.store(out_ptr + at, result.to(dtype), mask=keep[None, :])


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x` [T, K] times the transpose of `weight` [rows, K], for T = 1, 2 or 4; accumulated in float32.

    With `norm_eps`, each row of `x` is first divided by its root mean square (RMSNorm without weights). With `gated`,
    `weight` is [2I, K] and the result silu(first half) * second half, [T, I]. With `residual` [T, rows], contiguous,
    that is added.
    """
    num_tokens, width = x.shape
    rows = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(num_tokens, rows)
    per_program = 8 if rows > 2048 and num_tokens <= 2 else 4
    small_linear_kernel[(triton.cdiv(rows, per_program),)](
        x, weight, out if residual is None else residual, out, x.stride(0), rows, norm_eps or 0.0,
        K=width, NORM=norm_eps is not None, GATED=gated, RESIDUAL=residual is not None,
        M=num_tokens, N=per_program, WIDTH=min(WIDTH, triton.next_power_of_2(width)), num_warps=4,
        **launch_options(x.device, num_tokens),
    )  # fmt: skip
    return out


def serves(num_tokens: int) -> bool:
    """Whether `small_linear` takes a batch of `num_tokens`: a power of two, and few."""
    return num_tokens <= MAX_TOKENS and num_tokens & (num_tokens - 1) == 0 and num_tokens > 0
