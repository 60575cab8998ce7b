"""A row-parallel linear layer for few tokens whose kernel also sums over the ranks.

The product is that of `skinny_linear`. Then each program writes its partial sums to the other ranks' buffers, and waits for theirs
in its own (`distributed.one_shot_buffers`). All ranks add in the order of ranks, so their results are equal bit by bit.

There is no deadlock, even if few programs run at a time. A program waits for the program of the same number on the other ranks,
after it has sent its own values, and programs start in the order of their numbers. So the lowest program that waits always
receives its values. The programs of a kernel that may start while this one ends (`pdl`) start after all programs of this one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.distributed.one_shot_buffers import MOST_PROGRAMS, VALUES, OneShotBuffers
from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.skinny_linear import add_products, kernel_config, load_inputs, load_rows, repeat, total_rows

# Polls 8 bytes until they have the right number. The load bypasses caches that are not coherent with other GPUs.
WAIT = tl.constexpr("""{
    .reg .pred early;
    .reg .b64 pair;
    .reg .b32 number;
again:
    ld.relaxed.sys.global.b64 pair, [$1];
    mov.b64 {$0, number}, pair;
    setp.ne.b32 early, number, $2;
    @early bra again;
}""")


@triton.jit
def stack(rows):
    """Stack each token's tile [ROWS] to [M, ROWS]. Then each value has a thread, and all threads wait at the same time."""
    token = tl.arange(0, len(rows))[:, None]
    tile = tl.zeros([len(rows), rows[0].shape[0]], tl.float32)
    for m in tl.static_range(len(rows)):
        tile = tl.where(token == m, rows[m][None, :], tile)
    return tile


@triton.jit
def send(parts, buffer_ptr, number):
    """Write partial sums [M, ROWS] float32 of sum `number` to another rank's buffer."""
    pair = (number.to(tl.int64) << 32) | (parts.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    tl.store(buffer_ptr, pair)


@triton.jit
def receive(buffer_ptr, number, WAITS: tl.constexpr):
    """Wait for the partial sums of sum `number`, and return them. The interpreter does not wait: values that are missing are NaN."""
    if WAITS:
        parts = tl.inline_asm_elementwise(WAIT, "=r,l,r", [buffer_ptr, number], tl.int32, False, 1)
    else:
        pair = tl.load(buffer_ptr)
        parts = tl.where(pair >> 32 == number, pair, 0x7FC00000).to(tl.int32)
    return parts.to(tl.float32, bitcast=True)


@triton.jit
def summed_linear_kernel(
    x_ptr, weight_ptr, residual_ptr, out_ptr, buffer_ptrs, number_ptr, stride_x, num_rows, K: tl.constexpr, RANK: tl.constexpr,
    VALUES: tl.constexpr, RESIDUAL: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    WAITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: outputs p * ROWS to p * ROWS + ROWS of all M tokens, as in `skinny_linear_kernel`, summed over the ranks.

    RESIDUAL [M, num_rows] is added to the sum. A program uses only its own entry in the buffers.
    """
    let_next_start(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = K // 2 if weight_ptr.dtype.element_ty == tl.int32 else K
    SIZE: tl.constexpr = len(buffer_ptrs)
    place = tl.program_id(0)
    outputs = place * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, CHUNK)[None, :]
    weights = load_rows(weight_ptr + tl.minimum(outputs, num_rows - 1)[:, None].to(tl.int64) * WIDTH + k, k, WIDTH)
    wait_for_inputs(PDL)
    number = tl.load(number_ptr + place)
    token, row = tl.arange(0, M)[:, None], tl.arange(0, ROWS)[None, :]
    at, kept = token * num_rows + place * ROWS + row, place * ROWS + row < num_rows  # [M, ROWS], of the results
    y = tl.load(residual_ptr + at, mask=kept, other=0).to(tl.float32) if RESIDUAL else 0.0
    sums = repeat(tl.zeros([ROWS, CHUNK], tl.float32), M)
    x_row_ptr = x_ptr + k + tl.zeros([ROWS, 1], tl.int32)  # the same in all rows
    for i in tl.static_range(len(weights)):
        xs = load_inputs(x_row_ptr, stride_x, k, i * CHUNK, WIDTH, M)
        sums = add_products(sums, weights[i], xs, DTYPE)
    own = stack(total_rows(sums))
    offset = (place * 2 + (number & 1)) * SIZE * VALUES + token * ROWS + row  # [M, ROWS], of those from rank 0
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            send(own, buffer_ptrs[peer] + RANK * VALUES + offset, number)
    total = tl.zeros([M, ROWS], tl.float32)
    for sender in tl.static_range(SIZE):
        if sender == RANK:
            total += own
        else:
            total += receive(buffer_ptrs[RANK] + sender * VALUES + offset, number, WAITS)
    tl.store(out_ptr + at, (total + y).to(DTYPE), mask=kept)
    tl.store(number_ptr + place, number + 1)


def summed_linear(
    x: torch.Tensor, weight: torch.Tensor, one_shot_buffers: OneShotBuffers, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum over ranks of `x` [T, K] times the transpose of `weight` [rows, K], [T, rows] on every rank.

    Call it only if `can_handle`, on all ranks with the same shapes. The partial sums and their sum are float32. `residual` [T, rows]
    is added once.
    """
    num_tokens, width = x.shape
    rows = len(weight)
    out = x.new_empty(num_tokens, rows)
    num_warps, per_program, chunk = kernel_config(num_tokens, rows, width * x.itemsize)
    if x.itemsize == 2 and width % 2 == x.stride(0) % 2 == x.storage_offset() % 2 == weight.storage_offset() % 2 == 0:
        x, weight = x.view(torch.int32), weight.view(torch.int32)
    summed_linear_kernel[(triton.cdiv(rows, per_program),)](
        x, weight, out if residual is None else residual, out, one_shot_buffers.buffers, one_shot_buffers.numbers, x.stride(0), rows,
        K=width, RANK=one_shot_buffers.rank, VALUES=VALUES, RESIDUAL=residual is not None, M=num_tokens, ROWS=per_program,
        CHUNK=min(chunk, triton.next_power_of_2(x.shape[1])), WAITS=not triton.knobs.runtime.interpret, num_warps=num_warps,
        **launch_options(x.device, num_tokens),
    )  # fmt: skip
    return out


def can_handle(num_tokens: int, weight: torch.Tensor) -> bool:
    """Return whether the buffers have an entry for each program, and room for all of its results."""
    rows = len(weight)
    _, per_program, _ = kernel_config(num_tokens, rows, weight.shape[1] * weight.itemsize)
    return triton.cdiv(rows, per_program) <= MOST_PROGRAMS and num_tokens * per_program <= VALUES
