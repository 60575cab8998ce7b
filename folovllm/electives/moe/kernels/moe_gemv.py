"""`grouped_linear` for so few pairs that hardly two of them ask one expert: each reads the weights that it needs by itself.

Then there is nothing to group, and as in `skinny_linear` only the weights count. A program has a pair and some outputs. It asks
for all weights of these outputs at once and keeps them in registers, so that many bytes are under way at any time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.grouped_tiles import finish_tile
from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.skinny_linear import MAX_WARPS, load_chunk, load_rows, multiply_add

SPARSE = 4  # times as many experts as pairs: of 128 experts 32 pairs ask 28 or so
PROGRAM_BYTES = 12288  # of weights


@triton.jit
def moe_gemv_kernel(
    x_ptr, weight_ptr, order_ptr, starts_ptr, out_ptr, N, K: tl.constexpr, E: tl.constexpr, ALL: tl.constexpr,
    ASKED: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (p, q): outputs p * ROWS to p * ROWS + ROWS of the pair at place q. x and the weights are int32 where they are
    pairs of numbers. ALL is a power of two, E or more.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = K // 2 if weight_ptr.dtype.element_ty == tl.int32 else K
    place, e = tl.program_id(1), tl.arange(0, ALL)
    ends = tl.load(starts_ptr + 1 + e, mask=e < E, other=1 << 31)
    expert = tl.sum((ends <= place).to(tl.int32), 0)  # E, if another rank has it
    pair = tl.load(order_ptr + place).to(tl.int32)
    if expert < E:
        outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        rows = tl.minimum(outputs, N - 1)[:, None]  # what is past the last row reads that again, and is not stored
        k = tl.arange(0, CHUNK)[None, :]
        row_ptr = weight_ptr + (expert.to(tl.int64) * (2 * N if GATED else N) + rows) * WIDTH + k  # [ROWS, CHUNK]
        weights = load_rows(row_ptr, k, WIDTH)
        if GATED:
            up_weights = load_rows(row_ptr + tl.cast(N, tl.int64) * WIDTH, k, WIDTH)
        x_row_ptr = x_ptr + pair // ASKED * WIDTH + k + tl.zeros([ROWS, 1], tl.int32)  # the same in all rows
        total, total_up = tl.zeros([ROWS, CHUNK], tl.float32), tl.zeros([ROWS, CHUNK], tl.float32)
        for c in tl.static_range(len(weights)):
            x = load_chunk(x_row_ptr, k, c * CHUNK, WIDTH, "")
            total = multiply_add(weights[c], x, total, DTYPE)
            if GATED:
                total_up = multiply_add(up_weights[c], x, total_up, DTYPE)
        result = finish_tile(tl.sum(total, 1), tl.sum(total_up, 1), DTYPE, GATED)
        tl.store(out_ptr + pair * N + outputs, result, mask=outputs < N)


def is_supported(num_pairs: int, num_experts: int) -> bool:
    """Return whether the pairs are so few that `moe_gemv` is the fastest product."""
    return num_pairs * SPARSE <= num_experts


def kernel_config(row_bytes: int) -> tuple[int, int, int]:
    """Return (warps, rows, elements of 4 bytes that are read at a time) of a program; gate and up together are one row here.

    As many rows as PROGRAM_BYTES has room for, a power of two, and so many warps that a thread reads 128 bytes. Warps that
    are more than the rows share them.
    """
    rows = 1 << max(0, (PROGRAM_BYTES // row_bytes).bit_length() - 1)
    warps = min(MAX_WARPS, triton.next_power_of_2(triton.cdiv(rows * row_bytes, 128 * 32)))
    return warps, rows, 4 * 32 * max(1, warps // rows)


def moe_gemv(
    x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, gated: bool, out: torch.Tensor
) -> torch.Tensor:
    """Write the products of `grouped_linear` to `out` [pairs, N]."""
    (num_experts, width, k), top_k = weight.shape, len(order) // len(x)
    n = width // 2 if gated else width
    warps, rows, chunk = kernel_config(k * x.itemsize * (1 + gated))
    if x.itemsize == 2 and k % 2 == x.storage_offset() % 2 == weight.storage_offset() % 2 == 0:
        x, weight = x.view(torch.int32), weight.view(torch.int32)
    moe_gemv_kernel[(triton.cdiv(n, rows), len(order))](
        x, weight, order, starts, out, n, K=k, E=num_experts, ALL=triton.next_power_of_2(num_experts), ASKED=top_k,
        GATED=gated, ROWS=rows, CHUNK=min(chunk, triton.next_power_of_2(weight.shape[2])), num_warps=warps,
        **launch_options(x.device, 1),
    )  # fmt: skip
    return out
