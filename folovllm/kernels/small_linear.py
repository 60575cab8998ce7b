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
def row_products(
    x_ptr, weight_ptr, rows, keep, stride_x, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Inner products of M inputs [K] with N rows of the weight [*, K], masked by `keep` [N]: [M, N] float32.

    The first weights are on their way before the inputs are waited for.
    """
    inputs = tl.arange(0, M)
    acc = tl.zeros([M, N, WIDTH], tl.float32)
    for start in tl.static_range(0, K, WIDTH):
        k = start + tl.arange(0, WIDTH)
        inside = k < K
        w = tl.load(weight_ptr + rows[:, None] * K + k[None, :], mask=keep[:, None] & inside[None, :], other=0.0)
        if start == 0:
            wait_for_inputs(PDL)
        x = tl.load(x_ptr + inputs[:, None] * stride_x + k[None, :], mask=inside[None, :], other=0.0)
        acc += x[:, None, :].to(tl.float32) * w[None, :, :].to(tl.float32)
    return tl.sum(acc, 2)


@triton.jit
def small_linear_kernel(
    x_ptr, weight_ptr, out_ptr, stride_x, num_rows, K: tl.constexpr, GATED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: outputs p * N to p * N + N of all M tokens.

    GATED: the weight is gate and up stacked, `num_rows` rows each, and the output silu(gate) * up, rounded as the
    separate layers round: SiLU of the rounded gate, times the rounded up.
    """
    rows = tl.program_id(0) * N + tl.arange(0, N)
    keep = rows < num_rows
    rows = rows.to(tl.int64)
    dtype = out_ptr.dtype.element_ty
    y = row_products(x_ptr, weight_ptr, rows, keep, stride_x, K, M, N, WIDTH, PDL)
    if GATED:
        up = row_products(x_ptr, weight_ptr, rows + num_rows, keep, stride_x, K, M, N, WIDTH, False).to(dtype)
        gate = y.to(dtype).to(tl.float32)
        y = (gate / (1.0 + tl.exp(-gate))).to(dtype) * up
    out = out_ptr + tl.arange(0, M)[:, None] * num_rows + rows[None, :]
    tl.store(out, y.to(dtype), mask=keep[None, :])


def small_linear(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> torch.Tensor:
    """`x` [T, K] times the transpose of `weight` [rows, K], for T = 1, 2 or 4; accumulated in float32.

    With `gated`, `weight` is [2I, K] and the result silu(first half) * second half: [T, I].
    """
    num_tokens, width = x.shape
    rows = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(num_tokens, rows)
    per_program = 8 if rows > 2048 and num_tokens <= 2 else 4
    small_linear_kernel[(triton.cdiv(rows, per_program),)](
        x, weight, out, x.stride(0), rows, K=width, GATED=gated, M=num_tokens, N=per_program,
        WIDTH=min(WIDTH, triton.next_power_of_2(width)), num_warps=4,
        **launch_options(x.device, num_tokens),
    )  # fmt: skip
    return out


def serves(num_tokens: int) -> bool:
    """Whether `small_linear` takes a batch of `num_tokens`: a power of two, and few."""
    return num_tokens <= MAX_TOKENS and num_tokens & (num_tokens - 1) == 0 and num_tokens > 0
