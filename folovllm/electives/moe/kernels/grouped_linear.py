"""One matrix product for each expert, in one kernel: each multiplies the pairs (token, expert) that were sorted to it.

How many pairs an expert has is known on the device alone. So the grid has a program for every tile that there can be, and
each program finds out whose tile it is: tiles of one expert after those of another, as many as its pairs fill.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.electives.moe.kernels import moe_gemv
from folovllm.kernels.grouped_tiles import find_tile, finish_tile
from folovllm.kernels.variants import capability_of, kernel_variant


@triton.jit
def multiply_tile(
    x_ptr, matrix_ptr, token, inside, rows, N, K: tl.constexpr, GATED: tl.constexpr, TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of pairs meets rows of one expert's matrix: their products [TILE_M, TILE_N] in float32, and those of up.

    The pairs of an expert are neighbours in the sorted order, and their tokens lie anywhere: so x is gathered, a row a pair.

    Args:
        x_ptr: [tokens, K]. matrix_ptr: the expert's W [N, K]; GATED: gate [N, K], and up [N, K] right behind it.
        token: [TILE_M], int32, the row of x for each pair. inside: [TILE_M], which pairs there are; of others nothing is read.
        rows: [TILE_N], rows of W, all of them below N.
        K need not be a multiple of TILE_K: of what is behind it nothing is read, and it counts as 0.
        PRECISION: `tl.dot`'s `input_precision`.

    Returns:
        x W^T; and x U^T where GATED, else zeros (U is up).
    """
    k = tl.arange(0, TILE_K)
    inputs = x_ptr + token[:, None] * K + k[None, :]  # [TILE_M, TILE_K]
    weights = matrix_ptr + rows[None, :] * K + k[:, None]  # [TILE_K, TILE_N]
    total = tl.zeros((token.shape[0], rows.shape[0]), tl.float32)
    total_up = tl.zeros((token.shape[0], rows.shape[0]), tl.float32)
    for start in range(0, K, TILE_K):
        there = k < K - start
        x = tl.load(inputs + start, mask=inside[:, None] & there[None, :], other=0.0)
        w = tl.load(weights + start, mask=there[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
        if GATED:
            up = tl.load(weights + N * K + start, mask=there[:, None], other=0.0)
            total_up = tl.dot(x, up, total_up, input_precision=PRECISION)
    return total, total_up


@triton.jit
def grouped_linear_kernel(
    x_ptr, weight_ptr, order_ptr, starts_ptr, out_ptr, N, K: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr,
    ASKED: tl.constexpr, GATED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, tile of pairs): out[pair] = x[pair // ASKED] W[expert]^T, [TILE_M, TILE_N].

    GATED: W is gate and up stacked, N rows each, and the output silu(gate) * up, both rounded before they meet.
    """
    expert, begin, end = find_tile(starts_ptr, tl.program_id(1), E, WIDTH, TILE_M)
    if expert < E:
        place = begin.to(tl.int32) + tl.arange(0, TILE_M)
        inside = place < end.to(tl.int32)
        pair = tl.load(order_ptr + place, mask=inside, other=0).to(tl.int32)
        n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
        rows = tl.where(n < N, n, 0)  # what is past the last output reads the first again, and is not stored
        matrix_ptr = weight_ptr + expert.to(tl.int64) * (2 * N if GATED else N) * K
        total, total_up = multiply_tile(x_ptr, matrix_ptr, pair // ASKED, inside, rows, N, K, GATED, TILE_K, PRECISION)
        result = finish_tile(total, total_up, out_ptr.dtype.element_ty, GATED)
        tl.store(out_ptr + pair[:, None] * N + n[None, :], result, mask=inside[:, None] & (n < N)[None, :])


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each pair's row by the matrix of its expert.

    Args:
        x: [T, K] for tokens that all ask the same number of experts, or [pairs, K]; contiguous. T divides the pairs.
        weight: [E, N, K], contiguous; gated: [E, 2N, K], gate and up.
        order, starts: the pairs in the order of experts [pairs], and the experts' borders in it [E + 1]
            (`moe.layers.sort_by_expert`).
        gated: return silu(gate) * up.

    Returns:
        [pairs, N] in the order of pairs, not of experts. The rows of pairs behind starts[E] are as they were in `out`.
    """
    num_pairs, (num_experts, width, k) = len(order), weight.shape
    n = width // 2 if gated else width
    out = x.new_empty(num_pairs, n) if out is None else out
    if num_pairs == 0:
        return out
    if num_pairs * max(n, k) >= 2**31:
        raise ValueError(
            f"{num_pairs} pairs of {max(n, k)} numbers are too many for a kernel: lower max_num_batched_tokens"
        )
    each, capability = num_pairs // num_experts, capability_of(x.device)
    if moe_gemv.is_supported(num_pairs, num_experts):
        return moe_gemv.moe_gemv(x, weight, order, starts, gated, out)
    variant = kernel_variant("grouped_linear", x.device)
    if variant is not None and variant.is_supported(each, weight):
        return variant.launch(x, weight, order, starts, gated, out)
    tile_m, tile_n, tile_k, warps, stages = kernel_config(each, x.dtype, gated, capability)
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (tile_m - 1)) // tile_m
    grouped_linear_kernel[(triton.cdiv(n, tile_n), num_tiles)](
        x, weight, order, starts, out, n, K=k, E=num_experts, WIDTH=triton.next_power_of_2(num_experts),
        ASKED=num_pairs // len(x), GATED=gated, TILE_M=tile_m, TILE_N=tile_n, TILE_K=tile_k,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def kernel_config(each: int, dtype: torch.dtype, gated: bool, capability: int) -> tuple[int, int, int, int, int]:
    """Return tiles of pairs, of outputs and along K, warps, stages, by the pairs of an expert (`each`) if all have as many.

    Weights should be read once, so a tile holds the pairs of most experts: up to two or three square roots more than
    `each`. A gated product keeps two sums, so its tiles are half as wide where registers are short.
    """
    if dtype == torch.float32 or capability < 80:
        return 16, 32, 32, 4, 2
    if each <= 8:
        return 16, 32 if gated else 64, 128, 4, 4
    if each <= 24:
        return 32, 64, 128 if capability == 90 else 64, 4, 3
    if each <= 48:
        return 64, 64, 64, 4, 3
    return 128, 64 if gated or capability < 90 else 128, 32 if capability < 90 else 64, 8, 3
