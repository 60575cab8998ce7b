"""A product whose inputs are cut among ranks, and the sum over ranks in its last lines.

The product is `skinny_linear`'s. Then each program sends its parts of sums into the other ranks' buffers, and waits for theirs in
its own (`distributed.one_shot_buffers`). All ranks add up in the order of ranks, and so have the same bits.

A program waits for the program of the same number on another rank. It has sent before it waits, and programs start in the
order of their numbers: so of all that wait, that with the lowest number finds its values or gets them soon, and no rank's
programs keep another's from running, however few run at a time. A kernel that may start while this one ends (`pdl`) starts
its programs behind all of this one's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.distributed.one_shot_buffers import MOST_PROGRAMS, VALUES, OneShotBuffers
from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.skinny_linear import add_products, load_inputs, load_rows, repeat, tiling, total_rows

# Reads 8 bytes again and again, until it has the right number: past all caches that do not hear of other GPUs.
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
    """Tiles [ROWS] of each token, as one [M, ROWS]: then each value has a thread, and all are waited for at once."""
    token = tl.arange(0, len(rows))[:, None]
    tile = tl.zeros([len(rows), rows[0].shape[0]], tl.float32)
    for m in tl.static_range(len(rows)):
        tile = tl.where(token == m, rows[m][None, :], tile)
    return tile


@triton.jit
def send(parts, buffer_ptr, number):
    """Write parts [M, ROWS] float32 of sum `number` into another rank's buffer."""
    pair = (number.to(tl.int64) << 32) | (parts.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    tl.store(buffer_ptr, pair)


@triton.jit
def receive(buffer_ptr, number, WAITS: tl.constexpr):
    """Wait for parts of sum `number`. In the interpreter they are there, or are not numbers."""
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
    """Program p: outputs p * ROWS to p * ROWS + ROWS of all M tokens, as `skinny_linear_kernel`; then the other ranks' parts.

    RESIDUAL [M, num_rows] is added to the sum. A program uses its own place in the buffers alone.
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
    """The sum over ranks of `x` [T, K] times the transpose of `weight` [rows, K], on every rank: [T, rows].

    For what `fits`, as `skinny_linear` has it; all ranks call it with the same shapes. The parts of the sum are float32, and so is
    the sum, to which `residual` [T, rows] is added once.
    """
    num_tokens, width = x.shape
    rows = len(weight)
    out = x.new_empty(num_tokens, rows)
    num_warps, per_program, chunk = tiling(num_tokens, rows, width * x.itemsize)
    if x.itemsize == 2 and width % 2 == x.stride(0) % 2 == x.storage_offset() % 2 == weight.storage_offset() % 2 == 0:
        x, weight = x.view(torch.int32), weight.view(torch.int32)
    summed_linear_kernel[(triton.cdiv(rows, per_program),)](
        x, weight, out if residual is None else residual, out, one_shot_buffers.buffers, one_shot_buffers.numbers, x.stride(0), rows,
        K=width, RANK=one_shot_buffers.rank, VALUES=VALUES, RESIDUAL=residual is not None, M=num_tokens, ROWS=per_program,
        CHUNK=min(chunk, triton.next_power_of_2(x.shape[1])), WAITS=not triton.knobs.runtime.interpret, num_warps=num_warps,
        **launch_options(x.device, num_tokens),
    )  # fmt: skip
    return out


def fits(num_tokens: int, weight: torch.Tensor) -> bool:
    """Whether the buffers have a place for each program, and room for each of its results."""
    rows = len(weight)
    _, per_program, _ = tiling(num_tokens, rows, weight.shape[1] * weight.itemsize)
    return triton.cdiv(rows, per_program) <= MOST_PROGRAMS and num_tokens * per_program <= VALUES
