"""`int4_hopper`: what `quant_matmul` computes, for 17 to 256 tokens on Hopper, which has matrix units of its own (wgmma).

All tokens meet a weight at once where they fit into the registers, so it is unpacked once, or twice. Two groups of four warps
have 64 outputs each of a tile. Codes come straight to the registers from which the matrix units take the weights, and are
multiplied by their scales there: where these have 16 bits, what results is W as `unpacked` has it, bit for bit. One more warp
fetches x for both groups (TMA).

Programs share all tiles evenly, so that few tiles keep all of a GPU busy: a tile may begin in one program and end in another. A
unit is a piece of a tile's sum, and units are counted tile by tile; program p of P has units p * work / P to (p + 1) * work / P.
The last program at a tile adds its parts, always in the same order, so that the same numbers have the same sum in every run.
(`split_sum` gives each part of a tile a program.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
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

from folovllm.kernels.multiprocessors import num_sms
from folovllm.kernels.split_sum import counters
from folovllm.kernels.variants import KernelVariant

FEWEST, MOST = 17, 256  # tokens: with fewer `quant_matmul` is faster, and with more the library is as fast

GROUP = gl.constexpr(128)  # inputs that share a scale
WIDE = gl.constexpr(64)  # inputs of a box
ROWS = gl.constexpr(64)  # outputs of four warps: the height of a matrix instruction
NUM_STAGES = {256: 4, 128: 6, 64: 6, 32: 8}  # boxes of x on their way, by the tokens of a tile
BESIDE = 64  # tokens of a tile, up to which two programs fit beside each other

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
def first_unit(program, work):
    """Where a program's units begin, and those of the one before end."""
    return program * work // gl.num_programs(0)


@gluon.jit
def program_of(unit, work):
    """Who has this unit: the last one that begins at or before it."""
    return ((unit + 1) * gl.num_programs(0) - 1) // work


@gluon.jit
def part_of(program, first, which, work, SIZE: gl.constexpr):
    """Where a program leaves its part of the tile whose first unit is given; `which` half of it, of SIZE numbers.

    It has two parts at most: of the tile that it begins in, and of the one that it ends in.
    """
    return (4 * program + 2 * (first_unit(program, work) < first).to(gl.int32) + which) * SIZE


@gluon.jit
def add_parts(acc, part_ptr, done_ptr, first, end, which, work, TWO: gl.constexpr):
    """This program's part of the sum of units `first` to `end`, `acc`, one half of a tile: what is the sum of all, and
    whether it is known here. If not, somebody else comes later.

    Who comes last may have to wait until the others' parts are stored. They are at it, and wait for nobody. TWO: no tile has
    more than two parts. Then there need be no registers for a second sum, for a + b is b + a.
    """
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    ACC: gl.constexpr = acc.type.layout
    SIZE: gl.constexpr = ROWS * COLUMNS
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, ACC)), gl.arange(0, COLUMNS, gl.SliceLayout(0, ACC))
    part_ptr += row[:, None] * COLUMNS + column[None, :]
    mine, begins, ends = gl.program_id(0), program_of(first, work), program_of(end - 1, work)
    is_last = gl.atomic_add(done_ptr, 1, sem="relaxed") == ends - begins
    if is_last:
        while gl.atomic_add(done_ptr + 1, 0, sem="acquire") < ends - begins:
            pass
        gl.store(done_ptr, 0)
        gl.store(done_ptr + 1, 0)
        if TWO:
            acc += gl.load(part_ptr + part_of(begins + ends - mine, first, which, work, SIZE))
        else:
            total = gl.zeros([ROWS, COLUMNS], gl.float32, ACC)
            for program in range(begins, ends + 1):
                if program == mine:
                    total += acc
                else:
                    total += gl.load(part_ptr + part_of(program, first, which, work, SIZE))
            acc = total
    else:
        gl.store(part_ptr + part_of(mine, first, which, work, SIZE), acc)
        tl.debug_barrier()  # all threads have stored before one of them says so
        gl.atomic_add(done_ptr + 1, 1, sem="release")
    return acc, is_last


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
    factors = (twice(high), low, (zero + 0x4300) * 0x10001)
    if half == 0:
        pieces = gl.join(of_byte(BYTE_0, words, factors), of_byte(BYTE_1, words, factors))
    else:
        pieces = gl.join(of_byte(BYTE_2, words, factors), of_byte(BYTE_3, words, factors))
    weights = pieces.permute((0, 3, 2, 1)).reshape((ROWS, WIDE))  # of [64, 16, code % 2, code // 2]
    return gl.convert_layout(weights, WEIGHTS, assert_trivial=True)


@gluon.jit
def of_byte(ASM: gl.constexpr, words, factors):
    """The weights of both codes of one byte of each word, [64, 16, 2]."""
    high, low, zero = factors
    lower = gl.inline_asm_elementwise(ASM, "=r,r,r,r,r,r,r,r,r", [words, high, low, zero], gl.bfloat16, True, 2)
    upper = gl.inline_asm_elementwise(ASM, "=r,r,r,r,r,r,r,r,r", [words >> 4, high, low, zero], gl.bfloat16, True, 2)
    return gl.join(lower, upper)


@gluon.jit
def fetch_inputs(x_desc, smem, full, empty, K: gl.constexpr, token_tiles, work):
    """Fetch x for all units, each box as soon as both groups of warps are done with what lay in its place."""
    STAGES: gl.constexpr = full.shape[0]
    GROUPS: gl.constexpr = K // GROUP
    BM: gl.constexpr = smem.shape[1]
    begin, end = first_unit(gl.program_id(0), work), first_unit(gl.program_id(0) + 1, work)
    for unit in range(begin, end):
        for half in gl.static_range(2):
            i = 2 * (unit - begin) + half
            stage, phase = i % STAGES, (i // STAGES) & 1
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), x_desc.block_type.nbytes)
            corner = [unit // GROUPS % token_tiles * BM, unit % GROUPS * GROUP + half * WIDE]
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
def finish(
    acc, smem, pointers, shape, tile, which: gl.constexpr, K: gl.constexpr, RESIDUAL: gl.constexpr, TWO: gl.constexpr
):
    """Store one half of a tile, if all that it is the sum of is there."""
    part_ptr, done_ptr, residual_ptr, out_ptr = pointers
    OUTPUTS, num_tokens, token_tiles, work = shape
    first, end = tile * (K // GROUP), (tile + 1) * (K // GROUP)
    is_known = True
    if program_of(first, work) != program_of(end - 1, work):
        acc, is_known = add_parts(acc, part_ptr, done_ptr + (2 * tile + which) * 2, first, end, which, work, TWO)
    if is_known:
        row, token = (tile // token_tiles * 2 + which) * ROWS, tile % token_tiles * acc.shape[1]
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
def multiply(
    which: gl.constexpr, weights, x_tiles, y_tiles, full, empty, pointers, shape, nothing,
    K: gl.constexpr, RESIDUAL: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """The products of one half of each tile, 64 outputs."""
    GROUPS: gl.constexpr = K // GROUP
    BM: gl.constexpr = x_tiles.shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    OUTPUTS, _num_tokens, token_tiles, work = shape
    begin, end = first_unit(gl.program_id(0), work), first_unit(gl.program_id(0) + 1, work)
    first = begin
    while first < end:
        tile = first // GROUPS
        last = gl.minimum(end, (tile + 1) * GROUPS)
        acc = gl.zeros([ROWS, BM], gl.float32, ACC)
        row = (tile // token_tiles * 2 + which) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, A))
        group = (gl.minimum(row, OUTPUTS - 1) * GROUPS + first % GROUPS)[:, None]
        codes = load_codes(weights, group, A)
        a = half_of(codes, 0, A)
        for unit in range(first, last):
            following = load_codes(weights, group + gl.minimum(unit + 1, last - 1) - first, A)
            number = 2 * (unit - begin)
            acc, b = multiply_half(a, codes, 1, acc, number, x_tiles, full, empty, nothing)
            acc, a = multiply_half(b, following, 0, acc, number + 1, x_tiles, full, empty, nothing)
            codes = following
        finish(acc, y_tiles.index(which), pointers, shape, tile, which, K, RESIDUAL, TWO)
        first = last


@gluon.jit(do_not_specialize=["num_tokens", "token_tiles", "work", "nothing"])
def int4_hopper_kernel(
    x_desc, word_ptr, scale_ptr, zero_ptr, residual_ptr, part_ptr, done_ptr, out_ptr, num_tokens, token_tiles, work, nothing,
    OUTPUTS: gl.constexpr, K: gl.constexpr, RESIDUAL: gl.constexpr, TWO: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Program p of P has an even share of `work` units: a unit is a tile's products with one group of inputs.

    A tile is 128 outputs of as many tokens as a box has; those of the same outputs follow each other, `token_tiles` of them.
    `part_ptr` takes two tiles of each program. `done_ptr`, zero before and after, has four counters for each tile. `nothing`
    is 0, which the compiler must not know. REGISTERS: of a thread that multiplies.
    """
    BM: gl.constexpr = x_desc.block_shape[0]
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, WIDE], BOX)
    y_tiles = gl.allocate_shared_memory(x_desc.dtype, [2, BM, ROWS], BOX)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # both groups of warps
    fence_async_shared()
    weights, pointers = (word_ptr, scale_ptr, zero_ptr), (part_ptr, done_ptr, residual_ptr, out_ptr)
    shape = (OUTPUTS, num_tokens, token_tiles, work)
    gl.warp_specialize([
        (multiply, (0, weights, x_tiles, y_tiles, full, empty, pointers, shape, nothing, K, RESIDUAL, TWO)),
        (multiply, (1, weights, x_tiles, y_tiles, full, empty, pointers, shape, nothing, K, RESIDUAL, TWO)),
        (fetch_inputs, (x_desc, x_tiles, full, empty, K, token_tiles, work)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


def kernel_config(num_tokens: int, rows: int, width: int, sms: int) -> tuple[int, int]:
    """Tokens of a tile, and programs.

    Tiles of 256 tokens unpack each weight once, but registers have no room for a second sum beside one: so a program must
    have as much work as a tile, for then nobody shares a tile with more than one other.
    """
    outputs = triton.cdiv(rows, 2 * ROWS.value)
    if num_tokens > 128 and outputs * triton.cdiv(num_tokens, 256) >= sms:
        return 256, sms
    tile = min(128, max(32, triton.next_power_of_2(num_tokens)))
    tiles = outputs * triton.cdiv(num_tokens, tile)
    room = 2 * sms if tile <= BESIDE else sms
    most = width // (4 * GROUP.value)  # four groups are worth a program
    return tile, min(room, tiles * max(1, min(most, room // tiles)))


def is_supported(x: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> bool:
    """Whether the kernel computes these: for so many tokens, in bfloat16, for groups of 128 inputs whose zeros, if any,
    are codes, and for an `x` that the copy engine can read. (For one group alone Triton 3.6 makes no kernel.)
    """
    return (
        FEWEST <= len(x) <= MOST
        and x.dtype == torch.bfloat16
        and x.shape[1] == GROUP.value * scales.shape[1] > GROUP.value
        and (zeros is None or zeros.dtype == torch.uint8)
        and x.stride(1) == 1
        and x.stride(0) % 8 == x.data_ptr() % 16 == 0
    )


def int4_hopper(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product of `quant_matmul`, where `is_supported` says so."""
    num_tokens, width = x.shape
    rows, out = len(words), x.new_empty(num_tokens, len(words))
    tile, programs = kernel_config(num_tokens, rows, width, num_sms(x.device))
    token_tiles = triton.cdiv(num_tokens, tile)
    work = triton.cdiv(rows, 2 * ROWS.value) * token_tiles * (width // GROUP.value)
    parts = x.new_empty(2 * programs, 2 * ROWS.value, tile, dtype=torch.float32)
    x_desc = TensorDescriptor.from_tensor(x, [tile, WIDE.value], BOX.value)
    int4_hopper_kernel[(programs,)](
        x_desc, words, scales, zeros, out if residual is None else residual, parts, counters(x.device), out, num_tokens,
        token_tiles, work, 0, OUTPUTS=rows, K=width, RESIDUAL=residual is not None, TWO=tile == 256, STAGES=NUM_STAGES[tile],
        REGISTERS=112 if tile <= BESIDE else 240, num_warps=4, **({"maxnreg": 80} if tile <= BESIDE else {}),
    )  # fmt: skip
    return out


VARIANT = KernelVariant(is_supported, int4_hopper)
