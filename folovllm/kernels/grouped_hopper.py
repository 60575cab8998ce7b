"""`grouped_linear` for many pairs on Hopper, whose copy engine (TMA) fetches the weights.

A box of gate and the box of up that belongs to it lie in shared memory one behind the other, as one factor of 256 rows: the
largest that the matrix units take, so they read each row of x once for both. What the engine fetches needs no addresses in
registers, and where W ends it fills up with zeros. The rows of x lie anywhere, so threads gather them, as in `grouped_linear`.

Half of all experts have more pairs than the average, so often a last tile is almost empty: then half a tile is multiplied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from folovllm.kernels.few_pairs import finish_tile
from folovllm.kernels.grouped_linear import find_tile

TILE_M, ROWS, TILE_K = 128, 256, 64  # pairs, rows of W (gate's and up's together), numbers of each
WARPS, STAGES = 8, 4
MANY = 24  # pairs of each expert, from which on this is faster than smaller tiles


@triton.jit
def answer_tile(
    x_ptr, weight_desc, order_ptr, out_ptr, expert, begin, end, N, K: tl.constexpr, ASKED: tl.constexpr,
    PARTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Compute and store what an expert says to the pairs at the places from `begin` on, TILE_M at most, up to `end`."""
    place = begin.to(tl.int32) + tl.arange(0, TILE_M)
    inside = place < end.to(tl.int32)
    pair = tl.load(order_ptr + place, mask=inside, other=0).to(tl.int32)
    n, k = tl.program_id(0) * TILE_N, tl.arange(0, TILE_K)
    inputs = x_ptr + (pair // ASKED)[:, None] * K + k[None, :]
    total = tl.zeros((TILE_M, PARTS * TILE_N), tl.float32)
    for start in range(0, K, TILE_K):
        there = (k < K - start) | (K % TILE_K == 0)  # where this is known to the compiler, there is no mask
        x = tl.load(inputs + start, mask=inside[:, None] & there[None, :], other=0.0)
        box = weight_desc.load([expert.to(tl.int32) * PARTS, n, start])  # [PARTS, TILE_N, TILE_K]
        total = tl.dot(x, box.reshape(PARTS * TILE_N, TILE_K).T, total)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if PARTS == 2:
        gate, up = tl.split(total.reshape(TILE_M, 2, TILE_N).permute(0, 2, 1))
        result = finish_tile(gate, up, DTYPE, True)
    else:
        result = total.to(DTYPE)
    outputs = n + tl.arange(0, TILE_N)
    tl.store(out_ptr + pair[:, None] * N + outputs[None, :], result, mask=inside[:, None] & (outputs < N)[None, :])


@triton.jit
def grouped_hopper_kernel(
    x_ptr, weight_desc, order_ptr, starts_ptr, out_ptr, N, K: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr,
    ASKED: tl.constexpr, PARTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """As `grouped_linear_kernel`. `weight_desc` [E * PARTS, N, K] in boxes [PARTS, TILE_N, TILE_K]; 2 PARTS are gate and up."""
    expert, begin, end = find_tile(starts_ptr, tl.program_id(1), E, WIDTH, TILE_M)
    if expert < E:
        if end - begin > TILE_M // 2:
            answer_tile(x_ptr, weight_desc, order_ptr, out_ptr, expert, begin, end, N, K, ASKED, PARTS, TILE_M, TILE_N,
                        TILE_K)  # fmt: skip
        else:
            answer_tile(x_ptr, weight_desc, order_ptr, out_ptr, expert, begin, end, N, K, ASKED, PARTS, TILE_M // 2, TILE_N,
                        TILE_K)  # fmt: skip


def serves(each: int, weight: torch.Tensor, capability: int) -> bool:
    """Whether `grouped_hopper` is the product to take, if each expert had so many pairs. Rows must be 16 bytes, or some."""
    is_aligned = weight.shape[-1] % 8 == 0 and weight.data_ptr() % 16 == 0
    return capability == 90 and each > MANY and weight.itemsize == 2 and is_aligned


def grouped_hopper(
    x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, gated: bool, out: torch.Tensor
) -> torch.Tensor:
    """As `grouped_linear`, into `out` [pairs, N]."""
    num_pairs, (num_experts, width, k), parts = len(order), weight.shape, 1 + gated
    n, tile_n = width // parts, ROWS // parts
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (TILE_M - 1)) // TILE_M
    boxes = TensorDescriptor.from_tensor(weight.view(num_experts * parts, n, k), [parts, tile_n, TILE_K])
    grouped_hopper_kernel[(triton.cdiv(n, tile_n), num_tiles)](
        x, boxes, order, starts, out, n, K=k, E=num_experts, WIDTH=triton.next_power_of_2(num_experts),
        ASKED=num_pairs // len(x), PARTS=parts, TILE_M=TILE_M, TILE_N=tile_n, TILE_K=TILE_K, num_warps=WARPS,
        num_stages=STAGES,
    )  # fmt: skip
    return out
