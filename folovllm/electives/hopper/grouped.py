"""`grouped_linear` for many pairs on Hopper, whose copy engine (TMA) fetches the weights.

A box of gate and the box of up that belongs to it lie in shared memory one behind the other, as one factor of 256 rows: the
largest that the matrix units take, so they read each row of x once for both. What the engine fetches needs no addresses in
registers, and where W ends it fills up with zeros. The rows of x lie anywhere, so threads gather them, as in `grouped_linear`.

An expert's pairs seldom fill their last tile. Half of all experts have a few more than the average, which is often a whole
number of tiles. A tile for these few would begin anew, and read all weights again. So the tile before it takes up to REST pairs
more, as a second factor beside its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from folovllm.kernels.grouped_tiles import finish_tile
from folovllm.kernels.variants import KernelVariant

TILE_M = 128  # pairs of a tile
REST = 64  # the most that it takes besides, if there are no others; and the tile for so few
ROWS, TILE_K = 256, 64  # rows of W (gate's and up's together), numbers of each
WARPS, STAGES = 8, 4
MANY = 24  # pairs of each expert, from which on this is faster than smaller tiles


@triton.jit
def find_long_tile(starts_ptr, tile, E: tl.constexpr, WIDTH: tl.constexpr, TILE_M: tl.constexpr, REST: tl.constexpr):
    """As `find_tile`; but if an expert's last tile had REST pairs or fewer, its tile before has them.

    Returns:
        The expert, the tile's first place, and how many pairs there are from there on (or just more than a tile takes);
        0 where there is no such tile.
    """
    e = tl.arange(0, WIDTH)
    first = tl.load(starts_ptr + e, mask=e < E, other=0).to(tl.int32)
    end = tl.load(starts_ptr + e + 1, mask=e < E, other=0).to(tl.int32)
    tiles = tl.maximum(tl.cdiv(end - first - REST, TILE_M), (end > first).to(tl.int32))
    last = tl.cumsum(tiles, 0)
    number = tile - (last - tiles)  # of this tile among the expert's
    begin = first + number * TILE_M
    left = tl.minimum(end - begin, TILE_M + REST + 1)
    # All threads wait for each other in a sum, and no tile begins before: so one in place of three.
    all_three = (e.to(tl.int64) << 48) | (begin.to(tl.int64) << 16) | left
    found = tl.sum(tl.where((number >= 0) & (tile < last), all_three, 0), 0)
    return (found >> 48).to(tl.int32), (found >> 16).to(tl.int32), (found & 0xFFFF).to(tl.int32)


@triton.jit
def find_rows(order_ptr, x_ptr, left, K: tl.constexpr, ASKED: tl.constexpr, COUNT: tl.constexpr, TILE_K: tl.constexpr):
    """Of the next COUNT places: the pair, whether it is there (`left` are), and where its x begins."""
    i = tl.arange(0, COUNT)
    inside = i < left
    pair = tl.load(order_ptr + i, mask=inside, other=0).to(tl.int32)
    return pair, inside, x_ptr + (pair // ASKED)[:, None] * K + tl.arange(0, TILE_K)[None, :]


@triton.jit
def store_answers(total, out_ptr, pair, inside, n, N, PARTS: tl.constexpr, TILE_N: tl.constexpr):
    """Store the sums of some pairs, `total` [pairs, PARTS * TILE_N], as outputs n to n + TILE_N."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if PARTS == 2:
        gate, up = tl.split(total.reshape(total.shape[0], 2, TILE_N).permute(0, 2, 1))
        result = finish_tile(gate, up, DTYPE, True)
    else:
        result = total.to(DTYPE)
    outputs = n + tl.arange(0, TILE_N)
    tl.store(out_ptr + pair[:, None] * N + outputs[None, :], result, mask=inside[:, None] & (outputs < N)[None, :])


@triton.jit
def answer_tile(
    x_ptr, weight_desc, order_ptr, out_ptr, expert, left, N, K: tl.constexpr, ASKED: tl.constexpr, PARTS: tl.constexpr,
    TILE_M: tl.constexpr, REST: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Compute and store what an expert says to the `left` pairs at `order_ptr`, but to TILE_M + REST at most."""
    n, k = tl.program_id(0) * TILE_N, tl.arange(0, TILE_K)
    pair, inside, inputs = find_rows(order_ptr, x_ptr, left, K, ASKED, TILE_M, TILE_K)
    total = tl.zeros((TILE_M, PARTS * TILE_N), tl.float32)
    if REST:
        more_ptr, more = order_ptr + TILE_M, left - TILE_M
        rest, rest_inside, rest_inputs = find_rows(more_ptr, x_ptr, more, K, ASKED, REST, TILE_K)
        rest_total = tl.zeros((REST, PARTS * TILE_N), tl.float32)
    for start in range(0, K, TILE_K):
        there = ((k < K - start) | (K % TILE_K == 0))[None, :]  # where this is known to the compiler, there is no mask
        x = tl.load(inputs + start, mask=inside[:, None] & there, other=0.0)
        box = weight_desc.load([expert * PARTS, n, start])  # [PARTS, TILE_N, TILE_K]
        weights = box.reshape(PARTS * TILE_N, TILE_K).T
        total = tl.dot(x, weights, total)
        if REST:
            rest_x = tl.load(rest_inputs + start, mask=rest_inside[:, None] & there, other=0.0)
            rest_total = tl.dot(rest_x, weights, rest_total)
    store_answers(total, out_ptr, pair, inside, n, N, PARTS, TILE_N)
    if REST:
        store_answers(rest_total, out_ptr, rest, rest_inside, n, N, PARTS, TILE_N)


@triton.jit
def grouped_hopper_kernel(
    x_ptr, weight_desc, order_ptr, starts_ptr, out_ptr, N, K: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr,
    ASKED: tl.constexpr, PARTS: tl.constexpr, TILE_M: tl.constexpr, REST: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):  # fmt: skip
    """As `grouped_linear_kernel`. `weight_desc` [E * PARTS, N, K] in boxes [PARTS, TILE_N, TILE_K]; 2 PARTS are gate and up."""
    expert, begin, left = find_long_tile(starts_ptr, tl.program_id(1), E, WIDTH, TILE_M, REST)
    if left > 0:
        order_ptr += begin
        if (left > TILE_M) & (left <= TILE_M + REST):
            answer_tile(x_ptr, weight_desc, order_ptr, out_ptr, expert, left, N, K, ASKED, PARTS, TILE_M, REST, TILE_N,
                        TILE_K)  # fmt: skip
        elif left > REST:
            answer_tile(x_ptr, weight_desc, order_ptr, out_ptr, expert, left, N, K, ASKED, PARTS, TILE_M, 0, TILE_N,
                        TILE_K)  # fmt: skip
        else:
            answer_tile(x_ptr, weight_desc, order_ptr, out_ptr, expert, left, N, K, ASKED, PARTS, REST, 0, TILE_N,
                        TILE_K)  # fmt: skip


def is_supported(each: int, weight: torch.Tensor) -> bool:
    """Whether `grouped_hopper` is the product to take, if each expert had so many pairs. Rows must be 16 bytes, or some."""
    is_aligned = weight.shape[-1] % 8 == 0 and weight.data_ptr() % 16 == 0
    return each > MANY and weight.itemsize == 2 and is_aligned


def grouped_hopper(
    x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, gated: bool, out: torch.Tensor
) -> torch.Tensor:
    """Write the products of `grouped_linear` to `out` [pairs, N]."""
    num_pairs, (num_experts, width, k), parts = len(order), weight.shape, 1 + gated
    n, tile_n = width // parts, ROWS // parts
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (TILE_M - 1)) // TILE_M
    boxes = TensorDescriptor.from_tensor(weight.view(num_experts * parts, n, k), [parts, tile_n, TILE_K])
    grouped_hopper_kernel[(triton.cdiv(n, tile_n), num_tiles)](
        x, boxes, order, starts, out, n, K=k, E=num_experts, WIDTH=triton.next_power_of_2(num_experts),
        ASKED=num_pairs // len(x), PARTS=parts, TILE_M=TILE_M, REST=REST, TILE_N=tile_n, TILE_K=TILE_K, num_warps=WARPS,
        num_stages=STAGES,
    )  # fmt: skip
    return out


VARIANT = KernelVariant(is_supported, grouped_hopper)
