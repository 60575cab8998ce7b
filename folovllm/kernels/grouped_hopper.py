"""`grouped_linear` for many pairs on Hopper: its copy engine (TMA) fetches the weights.

What is fetched so needs no addresses in registers, and no thread that asks for it. The rows of x are gathered as ever, since
the engine only fetches boxes. Where W ends it fills up with zeros, so nothing is masked along K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from folovllm.kernels.few_pairs import finish_tile
from folovllm.kernels.grouped_linear import find_tile


@triton.jit
def answer_boxes(
    x_ptr, weight_desc, order_ptr, out_ptr, expert, begin, end, N, K: tl.constexpr, ASKED: tl.constexpr,
    GATED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """As `answer_tile`."""
    place = begin.to(tl.int32) + tl.arange(0, TILE_M)
    inside = place < end.to(tl.int32)
    pair = tl.load(order_ptr + place, mask=inside, other=0).to(tl.int32)
    n = tl.program_id(0) * TILE_N
    row = expert.to(tl.int32) * (2 * N if GATED else N) + n  # what is past N is another's, and is not stored
    k = tl.arange(0, TILE_K)
    inputs = x_ptr + (pair // ASKED)[:, None] * K + k[None, :]
    total, total_up = tl.zeros((TILE_M, TILE_N), tl.float32), tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, K, TILE_K):
        there = (k < K - start) | (K % TILE_K == 0)
        x = tl.load(inputs + start, mask=inside[:, None] & there[None, :], other=0.0)
        total = tl.dot(x, weight_desc.load([row, start]).T, total)
        if GATED:
            total_up = tl.dot(x, weight_desc.load([row + N, start]).T, total_up)
    result = finish_tile(total, total_up, out_ptr.dtype.element_ty, GATED)
    outputs = n + tl.arange(0, TILE_N)
    tl.store(out_ptr + pair[:, None] * N + outputs[None, :], result, mask=inside[:, None] & (outputs < N)[None, :])


@triton.jit
def grouped_hopper_kernel(
    x_ptr, weight_desc, order_ptr, starts_ptr, out_ptr, N, K: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr,
    ASKED: tl.constexpr, GATED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """As `grouped_linear_kernel`. `weight_desc`: the matrices end to end [E * rows, K], in boxes [TILE_N, TILE_K]."""
    expert, begin, end = find_tile(starts_ptr, tl.program_id(1), E, WIDTH, TILE_M)
    if expert < E:
        if HALF:
            if end - begin > TILE_M // 2:
                answer_boxes(x_ptr, weight_desc, order_ptr, out_ptr, expert, begin, end, N, K, ASKED, GATED,
                             TILE_M, TILE_N, TILE_K)  # fmt: skip
            else:
                answer_boxes(x_ptr, weight_desc, order_ptr, out_ptr, expert, begin, end, N, K, ASKED, GATED,
                             TILE_M // 2, TILE_N, TILE_K)  # fmt: skip
        else:
            answer_boxes(x_ptr, weight_desc, order_ptr, out_ptr, expert, begin, end, N, K, ASKED, GATED,
                         TILE_M, TILE_N, TILE_K)  # fmt: skip


def grouped_hopper(
    x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, gated: bool, out: torch.Tensor,
    tiles: tuple[int, ...],
) -> torch.Tensor:  # fmt: skip
    """As `grouped_linear`, into `out` [pairs, N]. A row of W is a multiple of 16 bytes."""
    num_pairs, (num_experts, width, k) = len(order), weight.shape
    n = width // 2 if gated else width
    tile_m, tile_n, tile_k, warps, stages, half = tiles
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (tile_m - 1)) // tile_m
    boxes = TensorDescriptor.from_tensor(weight.view(-1, k), [tile_n, tile_k])
    grouped_hopper_kernel[(triton.cdiv(n, tile_n), num_tiles)](
        x, boxes, order, starts, out, n, K=k, E=num_experts, WIDTH=triton.next_power_of_2(num_experts),
        ASKED=num_pairs // len(x), GATED=gated, TILE_M=tile_m, TILE_N=tile_n, TILE_K=tile_k, HALF=bool(half),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
