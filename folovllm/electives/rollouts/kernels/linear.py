"""`invariant_linear`: the product of a linear layer, with one tile shape for each weight, whatever the number of tokens.

A library chooses another kernel for another number of rows, and splits the sum over K for few rows. Here the shape of the weight
alone chooses the tile. Each program adds up all of K in the same order, and a matrix instruction computes each row of its tile
from that row alone. So the bits of a row depend neither on the number of rows nor on its place among them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = (
    96  # at least so many tiles of outputs, if the weight is large enough: then one row keeps a GPU's memory busy
)
STAGES = {64: 3, 32: 4, 16: 5}  # of a pipeline, by the outputs of a tile: narrow tiles need more reads in flight


@triton.jit(do_not_specialize=["num_rows"])
def invariant_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, stride_x, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, tile of outputs): x [BLOCK_M, K] times the transpose of weight [BLOCK_N, K], plus bias.

    Programs of one tile of outputs follow one another, so that the cache serves their weights.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = (rows < num_rows)[:, None], (outputs < N)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    x_ptr += rows.to(tl.int64)[:, None] * stride_x + k
    weight_ptr += outputs.to(tl.int64)[:, None] * K + k
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        is_x, is_weight = is_row, is_output
        if K % BLOCK_K != 0:
            is_x, is_weight = is_row & (start + k < K), is_output & (start + k < K)
        x = tl.load(x_ptr + start, mask=is_x, other=0.0)
        weight = tl.load(weight_ptr + start, mask=is_weight, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    out_ptr += rows.to(tl.int64)[:, None] * N + outputs[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=is_row & (outputs < N)[None, :])


def linear_tile(outputs: int, itemsize: int) -> tuple[int, int, int]:
    """Return (rows, outputs, inputs) of a tile for weights of so many outputs. It must not depend on the number of rows.

    64 rows are one matrix instruction on Hopper, and hold most decode steps. With one row the other 63 cost arithmetic and no reads.
    float32 without TF32 has no matrix instruction: its operands are in registers, so a tile has fewer inputs.
    """
    width = next((n for n in (64, 32) if triton.cdiv(outputs, n) >= PROGRAMS), 16)
    return 64, width, 128 if itemsize == 2 else 32


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x` [T, K] times the transpose of `weight` [N, K], plus `bias` [N]: [T, N], in the dtype of `x`.

    Rows of `x` may have any stride, their numbers are contiguous, and so is `weight`. Sums are float32.
    """
    (num_rows, inputs), outputs = x.shape, len(weight)
    out = x.new_empty(num_rows, outputs)
    if num_rows == 0:
        return out
    block_m, block_n, block_k = linear_tile(outputs, x.itemsize)
    invariant_linear_kernel[(triton.cdiv(num_rows, block_m), triton.cdiv(outputs, block_n))](
        x, weight, weight if bias is None else bias, out, num_rows, x.stride(0), N=outputs, K=inputs,
        BIAS=bias is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=STAGES[block_n],
    )  # fmt: skip
    return out
