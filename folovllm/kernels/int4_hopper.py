"""`int4_hopper`: what `int4_matmul` computes, for hundreds of tokens on Hopper: weights are unpacked once, for all of them.

Two groups of four warps have 64 outputs each and all tokens of a tile. Codes come straight to the registers from which the
matrix units (wgmma) take the weights. While these multiply one half of a group of inputs, a warp unpacks the next half into
other registers, and it waits before it gives those away (https://github.com/triton-lang/triton/issues/9433). One more warp
fetches x for both (TMA).

Programs share all tiles evenly, groups of inputs in a row: a tile may begin in one program and end in another. Whoever
brings a tile's last part adds all of them, always in the same order, as in `split_sum`.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from folovllm.kernels.split_sum import counters

GROUP = gl.constexpr(128)  # inputs that share a scale
WIDE = gl.constexpr(64)  # inputs of a box
ROWS = gl.constexpr(64)  # outputs of four warps: the height of a matrix instruction
REGISTERS = gl.constexpr((240, 24))  # of a thread that multiplies, and of one that fetches

BOX = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


def unpack_asm(select: str) -> gl.constexpr:
    """Assembly: the codes at bits 0 to 3 of one byte of two words, less $7, times a scale in two parts, as two bfloat16.

    A bfloat16's fraction counts ones from 128 on. The difference is exact, and so is its product with the second part of a
    scale of 16 bits; so there is one rounding.
    """
    return gl.constexpr(
        f"{{ .reg .b32 n, p; prmt.b32 n, $1, $2, {select}; lop3.b32 n, n, 0x000F000F, 0x43004300, 0xEA; "
        "sub.bf16x2 n, n, $7; mul.bf16x2 p, n, $5; fma.rn.bf16x2 $0, n, $3, p; }"
    )


BYTE_0, BYTE_1, BYTE_2, BYTE_3 = unpack_asm("0x4400"), unpack_asm("0x5511"), unpack_asm("0x6622"), unpack_asm("0x7733")


@gluon.jit
def twice(numbers):
    """Each bfloat16 two times, in a word."""
    bits = numbers.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@gluon.jit
def load_codes(weights, group, CODES: gl.constexpr):
    """The words [64, 16] of groups of inputs [64, 1], of an output each, and what makes weights of codes: scales, and zeros."""
    word_ptr, scale_ptr, zero_ptr = weights
    zero = gl.full([ROWS, 1], 8, gl.int32, CODES)
    if zero_ptr is not None:
        zero = gl.load(zero_ptr + group).to(gl.int32)
    words = gl.load(word_ptr + group * 16 + gl.arange(0, 16, gl.SliceLayout(0, CODES))[None, :])
    return words, gl.load(scale_ptr + group), zero


@gluon.jit
def half_of(codes, half: gl.constexpr, WEIGHTS: gl.constexpr):
    """The weights of inputs 64 * half to 64 * half + 64 of a group: [64, 64]."""
    words, scale, zero = codes
    exact = scale.to(gl.float32)
    high = exact.to(gl.bfloat16)
    low = twice((exact - high.to(gl.float32)).to(gl.bfloat16))
    high, zero = twice(high), (zero + 0x4300) * 0x10001
    upper = words >> 4
    if half == 0:
        a = gl.inline_asm_elementwise(BYTE_0, "=r,r,r,r,r,r,r,r,r", [words, high, low, zero], gl.bfloat16, True, 2)
        b = gl.inline_asm_elementwise(BYTE_0, "=r,r,r,r,r,r,r,r,r", [upper, high, low, zero], gl.bfloat16, True, 2)
        c = gl.inline_asm_elementwise(BYTE_1, "=r,r,r,r,r,r,r,r,r", [words, high, low, zero], gl.bfloat16, True, 2)
        d = gl.inline_asm_elementwise(BYTE_1, "=r,r,r,r,r,r,r,r,r", [upper, high, low, zero], gl.bfloat16, True, 2)
    else:
        a = gl.inline_asm_elementwise(BYTE_2, "=r,r,r,r,r,r,r,r,r", [words, high, low, zero], gl.bfloat16, True, 2)
        b = gl.inline_asm_elementwise(BYTE_2, "=r,r,r,r,r,r,r,r,r", [upper, high, low, zero], gl.bfloat16, True, 2)
        c = gl.inline_asm_elementwise(BYTE_3, "=r,r,r,r,r,r,r,r,r", [words, high, low, zero], gl.bfloat16, True, 2)
        d = gl.inline_asm_elementwise(BYTE_3, "=r,r,r,r,r,r,r,r,r", [upper, high, low, zero], gl.bfloat16, True, 2)
    both = gl.join(gl.join(a, b), gl.join(c, d))  # [64, 16, code % 2, code // 2]
    return gl.convert_layout(both.permute((0, 3, 2, 1)).reshape((ROWS, WIDE)), WEIGHTS, assert_trivial=True)


@gluon.jit
def first_unit(program, work):
    """Where a program's units begin, and those of the one before end."""
    return program * work // gl.num_programs(0)


@gluon.jit
def program_of(unit, work):
    """Who has this unit: the last one that begins at or before it."""
    return ((unit + 1) * gl.num_programs(0) - 1) // work


@gluon.jit
def slot_of(program, unit, which: gl.constexpr, work):
    """Where a program leaves its part of the tile that begins with `unit`.

    It has at most two parts: of the tile that it begins in, and of the one that it ends in.
    """
    return (2 * program + (first_unit(program, work) < unit).to(gl.int32)) * 2 + which


@gluon.jit
def fetch_inputs(x_desc, smem, full, empty, begin, end, K: gl.constexpr, TOKEN_TILES):
    """Fetch x for all units, each box as soon as both groups of warps are done with what lay in its place."""
    STAGES: gl.constexpr = full.shape[0]
    GROUPS: gl.constexpr = K // GROUP
    BM: gl.constexpr = smem.shape[1]
    for unit in range(begin, end):
        for half in gl.static_range(2):
            i = 2 * (unit - begin) + half
            stage, phase = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), x_desc.block_type.nbytes)
            corner = [unit // GROUPS % TOKEN_TILES * BM, unit % GROUPS * GROUP + half * WIDE]
            tma.async_copy_global_to_shared(x_desc, corner, full.index(stage), smem.index(stage))


@gluon.jit
def store_rows(acc, smem, out_ptr, residual_ptr, row, token, num_tokens, OUTPUTS, RESIDUAL: gl.constexpr):
    """Store sums [64, tokens] from a row and a token on, with the residual that is there: by way of shared memory, so that
    whole lines are read and written.
    """
    BM: gl.constexpr = acc.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(0, LINES))[None, :]
    tokens = token + gl.arange(0, BM, gl.SliceLayout(1, LINES))[:, None]
    at, kept = tokens * OUTPUTS + rows, (tokens < num_tokens) & (rows < OUTPUTS)
    if RESIDUAL:
        smem.store(gl.load(residual_ptr + at, mask=kept, other=0.0))
        acc += smem.permute((1, 0)).load(acc.type.layout).to(gl.float32)
    smem.permute((1, 0)).store(acc.to(smem.dtype))
    gl.store(out_ptr + at, smem.load(LINES), mask=kept)


@gluon.jit
def add_parts(acc, part_ptr, done_ptr, tile, which: gl.constexpr, work, GROUPS: gl.constexpr, TWO: gl.constexpr):
    """A part of a tile: whether all others came before it, and if so the sum of all; else it is left to the last one.

    Who finds that all others came may have to wait until they have stored theirs. They are at it, and wait for nobody.
    """
    BM: gl.constexpr = acc.shape[1]
    ACC: gl.constexpr = acc.type.layout
    first, last = program_of(tile * GROUPS, work), program_of((tile + 1) * GROUPS - 1, work)
    place = gl.arange(0, ROWS, gl.SliceLayout(1, ACC))[:, None] * BM + gl.arange(0, BM, gl.SliceLayout(0, ACC))[None, :]
    mine = gl.program_id(0)
    came_ptr = done_ptr + (tile * 2 + which) * 2
    is_last = gl.atomic_add(came_ptr, 1, sem="relaxed") == last - first
    if is_last:
        while gl.atomic_add(came_ptr + 1, 0, sem="acquire") < last - first:
            pass
        gl.store(came_ptr, 0)
        gl.store(came_ptr + 1, 0)
        if TWO:  # a + b is b + a
            acc += gl.load(part_ptr + slot_of(first + last - mine, tile * GROUPS, which, work) * (ROWS * BM) + place)
        else:
            total = gl.zeros([ROWS, BM], gl.float32, ACC)
            for program in range(first, last + 1):
                if program == mine:
                    total += acc
                else:
                    total += gl.load(part_ptr + slot_of(program, tile * GROUPS, which, work) * (ROWS * BM) + place)
            acc = total
    else:
        gl.store(part_ptr + slot_of(mine, tile * GROUPS, which, work) * (ROWS * BM) + place, acc)
        gl.thread_barrier()
        gl.atomic_add(came_ptr + 1, 1, sem="release")
    return acc, is_last


@gluon.jit
def finish(acc, smem, sums, tile, which: gl.constexpr, K: gl.constexpr, RESIDUAL: gl.constexpr, TWO: gl.constexpr):
    """Store a tile, or a part of one."""
    GROUPS: gl.constexpr = K // GROUP
    part_ptr, done_ptr, out_ptr, residual_ptr, num_tokens, OUTPUTS, TOKEN_TILES, work, nothing = sums
    row, token = (tile // TOKEN_TILES * 2 + which) * ROWS, tile % TOKEN_TILES * acc.shape[1]
    is_last = True
    if program_of(tile * GROUPS, work) != program_of((tile + 1) * GROUPS - 1, work):
        acc, is_last = add_parts(acc, part_ptr, done_ptr, tile, which, work, GROUPS, TWO)
    if is_last:
        store_rows(acc, smem, out_ptr, residual_ptr, row, token, num_tokens, OUTPUTS, RESIDUAL)


@gluon.jit
def multiply_half(a, following, half: gl.constexpr, acc, number, x_tiles, full, empty, nothing):
    """One box's products, and meanwhile the weights for the next one: a half of the codes that follow.

    The compiler must believe that these depend on the clock, or it unpacks them between two instructions of the product.
    """
    STAGES: gl.constexpr = full.shape[0]
    WEIGHTS: gl.constexpr = a.type.layout
    stage = number % STAGES
    mbarrier.wait(full.index(stage), (number // STAGES) & 1)
    acc = warpgroup_mma(a, x_tiles.index(stage).permute((1, 0)), acc, is_async=True)
    words, scale, zero = following
    now = gl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r,r", [nothing], gl.int32, False, 1)
    b = half_of((words ^ (now & nothing), scale, zero), half, WEIGHTS)
    acc, a = warpgroup_mma_wait(0, deps=[acc, a])
    mbarrier.arrive(empty.index(stage))
    return acc, b


@gluon.jit
def multiply(which: gl.constexpr, weights, x_tiles, y_tiles, full, empty, sums, begin, end, K: gl.constexpr, RESIDUAL: gl.constexpr, TWO: gl.constexpr):
    """The products of 64 outputs of each tile."""
    GROUPS: gl.constexpr = K // GROUP
    BM: gl.constexpr = x_tiles.shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    part_ptr, done_ptr, out_ptr, residual_ptr, num_tokens, OUTPUTS, TOKEN_TILES, work, nothing = sums
    first = begin
    while first < end:
        tile = first // GROUPS
        last = gl.minimum(end, (tile + 1) * GROUPS)
        acc = gl.zeros([ROWS, BM], gl.float32, ACC)
        row = (tile // TOKEN_TILES * 2 + which) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, A))
        group = (gl.minimum(row, OUTPUTS - 1) * GROUPS + first % GROUPS)[:, None]
        codes = load_codes(weights, group, A)
        a = half_of(codes, 0, A)
        for unit in range(first, last):
            following = load_codes(weights, group + gl.minimum(unit + 1, last - 1) - first, A)
            number = 2 * (unit - begin)
            acc, b = multiply_half(a, codes, 1, acc, number, x_tiles, full, empty, nothing)
            acc, a = multiply_half(b, following, 0, acc, number + 1, x_tiles, full, empty, nothing)
            codes = following
        finish(acc, y_tiles.index(which), sums, tile, which, K, RESIDUAL, TWO)
        first = last


@gluon.jit(do_not_specialize=["num_tokens", "token_tiles", "work", "nothing"])
def int4_hopper_kernel(
    x_desc, word_ptr, scale_ptr, zero_ptr, residual_ptr, part_ptr, done_ptr, out_ptr, num_tokens, token_tiles, work, nothing,
    OUTPUTS: gl.constexpr, K: gl.constexpr, RESIDUAL: gl.constexpr, TWO: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Program p of P: units p * work / P to (p + 1) * work / P. A unit is a tile's products with one group of inputs."""
    BM: gl.constexpr = x_desc.block_shape[0]
    begin, end = first_unit(gl.program_id(0), work), first_unit(gl.program_id(0) + 1, work)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, WIDE], BOX)
    y_tiles = gl.allocate_shared_memory(x_desc.dtype, [2, BM, ROWS], BOX)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # both groups of warps
    fence_async_shared()
    weights = (word_ptr, scale_ptr, zero_ptr)
    sums = (part_ptr, done_ptr, out_ptr, residual_ptr, num_tokens, OUTPUTS, token_tiles, work, nothing)
    gl.warp_specialize([
        (multiply, (0, weights, x_tiles, y_tiles, full, empty, sums, begin, end, K, RESIDUAL, TWO)),
        (multiply, (1, weights, x_tiles, y_tiles, full, empty, sums, begin, end, K, RESIDUAL, TWO)),
        (fetch_inputs, (x_desc, x_tiles, full, empty, begin, end, K, token_tiles)),
    ], [4, 1], [REGISTERS[0], REGISTERS[1]])  # fmt: skip


def int4_hopper(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    tile: int = 256,
    stages: int = 4,
    programs: int = 132,
) -> torch.Tensor:
    """As `int4_matmul`."""
    num_tokens, width = x.shape
    rows, out = len(words), x.new_empty(num_tokens, len(words))
    token_tiles = triton.cdiv(num_tokens, tile)
    work = triton.cdiv(rows, 2 * ROWS.value) * token_tiles * (width // GROUP.value)
    programs = min(programs, work)
    parts = x.new_empty(2 * programs, 2 * ROWS.value * tile, dtype=torch.float32)
    x_desc = TensorDescriptor.from_tensor(x, [tile, WIDE.value], BOX.value)
    int4_hopper_kernel[(programs,)](
        x_desc, words, scales, zeros, out if residual is None else residual, parts, counters(x.device), out, num_tokens,
        token_tiles, work, 0, OUTPUTS=rows, K=width, RESIDUAL=residual is not None, TWO=tile == 256, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return out
