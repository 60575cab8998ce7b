"""`few_codes` for Hopper: weights lie in shared memory before they are needed, and programs stay.

`few_codes` keeps all that it has asked for in registers. So the next product's programs find no room before its own have
left, and its bytes, its arithmetic and the way from one kernel to the next add up. Here a program has a ring of places in
shared memory, which copies without registers fill (`cp.async`). It asks for as much as the ring holds before it waits for its
inputs, and for more as soon as something is read: the memory is never idle, and two kernels fit side by side.

As many programs as the card has room for stay for all lines, so that each makes its `x` ready once. Lines are as in
`few_codes`: 16 for each warp, of which each is a part of a row (`code_tiles`).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.unpack_codes import EIGHT_TO_BFLOAT16, SHIFT, four_bytes

four_bytes = gluon.jit(four_bytes.fn)
let_next_start = gluon.jit(let_next_start.fn)
wait_for_inputs = gluon.jit(wait_for_inputs.fn)
WORDS = gl.constexpr(16)


@gluon.jit
def append(items, item):
    """A tuple of tiles, and one more."""
    return items + (item,)  # noqa: RUF005


@gluon.jit
def copy_lines(
    ring, word_ptr, slot, first, end, num_rows, NUM: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
    SPLITS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Ask for all words of the lines from `first` on, into `ring`, of each tile two [slots, 8 WARPS, WORDS]; zeros from `end` on."""
    STEP: gl.constexpr = SPLITS * PARTS * WORDS
    place = gl.arange(0, 8 * gl.num_warps(), gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))[None, :]
    for h in gl.static_range(2):
        line = place % 8 // PARTS + h * (8 // PARTS)
        row = first + place // (8 * SPLITS) * ROWS + line % ROWS
        word = ((place // 8 % SPLITS * PARTS + place % PARTS) * WORDS)[:, None] + column
        ptr = word_ptr + (row + line // ROWS * num_rows).to(gl.int64)[:, None] * NUM + word
        for c in gl.static_range(len(ring) // 2):
            there = (row < end)[:, None]
            if (c + 1) * STEP > NUM:
                there = there & (word + c * STEP < NUM)
            async_copy.async_copy_global_to_shared(ring[2 * c + h].index(slot), ptr + c * STEP, there)


@gluon.jit
def copy_factors(
    kept, scale_ptr, slot, first, end, num_rows, K: gl.constexpr, INPUTS: gl.constexpr, GROUP_ROWS: gl.constexpr,
    GROUP: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Ask for the scales of the same lines, into `kept`, of each tile [slots, lines, words]: 4 bytes each."""
    EACH: gl.constexpr = 32 // scale_ptr.dtype.element_ty.primitive_bitwidth
    WIDTH: gl.constexpr = PARTS // EACH
    LINES: gl.constexpr = 16 // PARTS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // WIDTH, WIDTH], [gl.num_warps(), 1], [1, 0])
    place = gl.arange(0, gl.num_warps() * LINES, gl.SliceLayout(1, LAYOUT))[:, None]
    part = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :] * EACH
    row = first + place // (LINES * SPLITS) * ROWS + place % ROWS
    group = (row + place % LINES // ROWS * num_rows) // GROUP_ROWS * ((K + GROUP - 1) // GROUP)
    word_ptr = scale_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    for c in gl.static_range(len(kept)):
        input = ((c * SPLITS + place // LINES % SPLITS) * PARTS + part) * INPUTS
        ptr = word_ptr + (group + input // GROUP) // EACH
        async_copy.async_copy_global_to_shared(kept[c].index(slot), ptr, (row < end) & (input < K))


@gluon.jit
def load_offsets(
    zero_ptr, factors, first, end, num_rows, K: gl.constexpr, INPUTS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, SPLITS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Of each tile what the sum of its `x` is to be multiplied by because of zeros, [WARPS, 16, 1]."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, ACC)
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, LAYOUT))[:, None]
    place = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    row = gl.minimum(first + warp // SPLITS * ROWS + place // PARTS % ROWS, end - 1) + place // PARTS // ROWS * num_rows
    tiles = ()
    for c in gl.static_range((K + INPUTS * SPLITS * PARTS - 1) // (INPUTS * SPLITS * PARTS)):
        input = ((c * SPLITS + warp % SPLITS) * PARTS + place % PARTS) * INPUTS
        zero = gl.load(zero_ptr + row * ((K + GROUP - 1) // GROUP) + input // GROUP, mask=input < K, other=0)
        tiles = append(tiles, zero.to(gl.float32)[:, :, None])
    return tiles


@gluon.jit
def in_order(tile):
    """Numbers [8 WARPS, 64] in the order of the inputs as [WARPS, 8, 64] in the order in which a tensor core takes them."""
    tile = gl.permute(gl.reshape(tile, [tile.shape[0], 4, 2, 2, 2, 2]), [0, 2, 3, 4, 1, 5])
    return gl.reshape(tile, [tile.shape[0] // 8, 8, 64])


@gluon.jit
def eight_codes(words):
    """Codes of words [8 WARPS, WORDS] plus 128 as [WARPS, 8, 8 WORDS]: those of bits i and i + 16 are neighbours."""
    FOUR: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        EIGHT_TO_BFLOAT16, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], FOUR + FOUR, True, 1)  # fmt: skip
    both = gl.join(gl.join(gl.join(a, c), gl.join(b, d)), gl.join(gl.join(e, g), gl.join(f, h)))
    tile = gl.permute(gl.reshape(both, [words.shape[0], 4, 2, 2, 2, 2, 2]), [0, 2, 3, 4, 5, 1, 6])
    return gl.reshape(tile, [words.shape[0] // 8, 8, 128])


@gluon.jit
def sixteen(low, high, KIND: gl.constexpr, DTYPE: gl.constexpr, ACC: gl.constexpr):
    """Words of lines 0 to 7 and of lines 8 to 15 as numbers [WARPS, 16, inputs], the left factor of a product."""
    if KIND == "int4":
        low, high = eight_codes(low), eight_codes(high)
    else:
        low, high = in_order(four_bytes(low, KIND, DTYPE)), in_order(four_bytes(high, KIND, DTYPE))
    both = gl.permute(gl.join(low, high), [0, 3, 1, 2])
    both = gl.reshape(both, [both.shape[0], 16, both.shape[3]])
    return gl.convert_layout(both, gl.DotOperandLayout(0, ACC, 2), assert_trivial=True)


@gluon.jit
def load_inputs(
    ptr, stride, c: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr, M: gl.constexpr,
    SPLITS: gl.constexpr, INPUTS: gl.constexpr,
):  # fmt: skip
    """`x`, or its factors, where it meets tile c of the words: [8 SPLITS, INPUTS], each of 8 lines a token's part."""
    EACH: gl.constexpr = min(8, INPUTS * SPLITS // (4 * gl.num_warps()))  # of a thread
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, EACH], [EACH * 32 // INPUTS, INPUTS // EACH], [gl.num_warps(), 1], [1, 0])
    line = gl.arange(0, 8 * SPLITS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, INPUTS, gl.SliceLayout(0, LAYOUT))[None, :]
    part = (c * SPLITS * 8 + line) // M
    if KIND == "int4":
        PLANE: gl.constexpr = GROUP // 8
        word = part * WORDS
        at = (word // PLANE * GROUP + word % PLANE)[:, None] + column // WORDS * PLANE + column % WORDS
    else:
        at = (part * INPUTS)[:, None] + column
    return gl.load(ptr + (line % M * stride)[:, None] + at, mask=(part * INPUTS < K)[:, None] & (at < K), other=0)


@gluon.jit
def as_right(tile, KIND: gl.constexpr, BLOCKS: gl.constexpr, ACC: gl.constexpr):
    """`x` in shared memory, [SPLITS, 8, inputs], as the right factor of products, [WARPS, inputs, 8]."""
    SPLITS: gl.constexpr = tile.shape[0]
    INPUTS: gl.constexpr = tile.shape[2]
    if KIND == "int4":
        WIDE: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8, 4], [1, 1, 8, 1, 4], [BLOCKS, SPLITS, 1, 1, 1], [4, 3, 2, 1, 0])
        x = tile.reshape([SPLITS, 8, 8, WORDS]).load(gl.SliceLayout(0, WIDE))
    else:
        LONG: gl.constexpr = gl.BlockedLayout([1, 1, 1, 16], [1, 1, 8, 4], [BLOCKS, SPLITS, 1, 1], [3, 2, 1, 0])
        x = tile.load(gl.SliceLayout(0, LONG))
    x = gl.expand_dims(x, 0)
    if KIND == "int4":
        x = x.broadcast_to([BLOCKS, SPLITS, 8, 8, WORDS])
        x = gl.permute(gl.reshape(x, [BLOCKS * SPLITS * 8, 2, 2, 2, 4, 2, 2]), [0, 5, 6, 2, 3, 4, 1])
        x = gl.reshape(x, [BLOCKS * SPLITS, 8, INPUTS])
    else:
        x = in_order(gl.reshape(x.broadcast_to([BLOCKS, SPLITS, 8, INPUTS]), [BLOCKS * SPLITS * 8, INPUTS]))
    return gl.convert_layout(gl.permute(x, [0, 2, 1]), gl.DotOperandLayout(1, ACC, 2), assert_trivial=True)


@gluon.jit
def along(factor, tile, AXIS: gl.constexpr):
    """Numbers [n] as factors of a tile of three dimensions, of which AXIS, 1 or 2, has n."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3 - AXIS, tile.type.layout))
    return gl.expand_dims(gl.expand_dims(gl.convert_layout(factor, LAYOUT), 0), 3 - AXIS)


@gluon.jit
def ready(x_ptr, columns_ptr, stride_x, eps, K: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr, NORM: gl.constexpr,
          M: gl.constexpr, BLOCKS: gl.constexpr, SPLITS: gl.constexpr, INPUTS: gl.constexpr, COUNT: gl.constexpr, ACC: gl.constexpr):  # fmt: skip
    """Tiles of `x` as right factors, and what their products are to be multiplied by, [M].

    With FP8 they are float16, divided by the largest of each token. All warps share the work, and shared memory.
    """
    HALVES: gl.constexpr = KIND == "fp8"
    DTYPE: gl.constexpr = gl.float16 if HALVES else x_ptr.dtype.element_ty
    tiles, squares, peak = (), 0.0, 0.0
    for c in gl.static_range(COUNT):
        x = load_inputs(x_ptr, stride_x, c, K, GROUP, KIND, M, SPLITS, INPUTS)
        if NORM:
            squares += x.to(gl.float32) * x.to(gl.float32)
        if columns_ptr is not None:
            x *= load_inputs(columns_ptr, 0, c, K, GROUP, KIND, M, SPLITS, INPUTS)
        if HALVES:
            peak = gl.maximum(peak, gl.abs(x.to(gl.float32)))
        tiles = append(tiles, x)
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(gl.reshape(gl.sum(squares, 1), [8 * SPLITS // M, M]), 0) / K + eps)
    if HALVES:
        peak = gl.maximum(gl.max(gl.reshape(gl.max(peak, 1), [8 * SPLITS // M, M]), 0), 1e-30)
        factor = peak * gl.convert_layout(factor, peak.type.layout) if NORM else peak
        inverse = 1.0 / peak
    kept = gl.allocate_shared_memory(DTYPE, [COUNT, SPLITS, 8, INPUTS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    for c in gl.static_range(COUNT):
        x = tiles[c]
        if HALVES:
            wide = gl.reshape(x.to(gl.float32), [x.shape[0] // M, M, INPUTS])
            x = gl.reshape(wide * along(inverse, wide, 1), [x.shape[0], INPUTS]).to(DTYPE)
        kept.index(c).reshape([8 * SPLITS, INPUTS]).store(x)
    rights = ()
    for c in gl.static_range(COUNT):
        rights = append(rights, as_right(kept.index(c), KIND, BLOCKS, ACC))
    return rights, factor


@gluon.jit
def sum_parts(acc, BLOCKS: gl.constexpr, SPLITS: gl.constexpr, M: gl.constexpr, ACC: gl.constexpr):
    """Of products [WARPS, 16, 8] those of a part with itself, added up: [BLOCKS, lines, M]."""
    PARTS: gl.constexpr = 8 // M
    line = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, ACC)))[None, :, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, ACC)))[None, None, :]
    acc = gl.where(line % PARTS == column // M, acc, 0.0)
    each = gl.sum(gl.reshape(acc, [BLOCKS * SPLITS, 16 // PARTS, PARTS, PARTS, M]), 3)
    each = gl.sum(each, 2)
    return gl.sum(gl.reshape(each, [BLOCKS, SPLITS, 16 // PARTS, M]), 1)


@gluon.jit
def silu_times(y, DTYPE: gl.constexpr):
    """Lines of gate and then of up, [BLOCKS, 2 ROWS, M], as silu(gate) * up; both are rounded before they meet."""
    gate, up = gl.split(gl.permute(gl.reshape(y, [y.shape[0], 2, y.shape[1] // 2, y.shape[2]]), [0, 2, 3, 1]))
    gate, up = gate.to(DTYPE).to(gl.float32), up.to(DTYPE).to(gl.float32)
    return (gate / (1.0 + gl.exp(-gate))).to(DTYPE).to(gl.float32) * up


@gluon.jit
def multiply(words, factors, zeros, rights, bases, KIND: gl.constexpr, BY_TILE: gl.constexpr, ACC: gl.constexpr):
    """Sums [WARPS, 16, 8] of the products of all tiles of a line, times their scales."""
    zero = gl.zeros([gl.num_warps(), 16, 8], gl.float32, ACC)
    acc = zero
    for c in gl.static_range(len(rights)):
        left = sixteen(words[2 * c], words[2 * c + 1], KIND, rights[c].dtype, ACC)
        if BY_TILE:
            acc += mma_v2(left, rights[c], bases[c] if KIND == "int4" else zero) * factors[c]
        else:
            acc = mma_v2(left, rights[c], acc)
        if len(zeros) > 0:
            acc += bases[c] * ((8 - zeros[c]) * factors[c] * (-1 / SHIFT))
    return acc if BY_TILE else acc * factors[0]


@gluon.jit
def few_codes_hopper_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, columns_ptr, residual_ptr, out_ptr, stride_x, num_rows, eps, K: gl.constexpr,
    GROUP_ROWS: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr,
    RESIDUAL: gl.constexpr, M: gl.constexpr, SPLITS: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr, ABLATE: gl.constexpr = 0,
):  # fmt: skip
    """As `few_codes_kernel`; program p of P has the p-th of P equal shares of the outputs."""
    let_next_start(PDL)
    BLOCKS: gl.constexpr = gl.num_warps() // SPLITS
    PARTS: gl.constexpr = 8 // M
    ROWS: gl.constexpr = 16 // PARTS // (1 + GATED)
    NUM: gl.constexpr = K // 8 if KIND == "int4" else K // 4
    INPUTS: gl.constexpr = WORDS * (K // NUM)
    COUNT: gl.constexpr = (NUM + SPLITS * PARTS * WORDS - 1) // (SPLITS * PARTS * WORDS)
    BY_TILE: gl.constexpr = GROUP < K or KIND == "int4"
    BITS: gl.constexpr = scale_ptr.dtype.element_ty.primitive_bitwidth
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ZEROS: gl.constexpr = zero_ptr is not None
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, 8])
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    share, rest = num_rows // gl.num_programs(0), num_rows % gl.num_programs(0)
    first = gl.program_id(0) * share + gl.minimum(gl.program_id(0), rest)
    end = first + share + (gl.program_id(0) < rest).to(gl.int32)
    ring, kept, bases = (), (), ()
    for c in gl.static_range(2 * COUNT):
        slots = gl.allocate_shared_memory(gl.int32, [SLOTS, 8 * gl.num_warps(), WORDS], FLAT)
        ring = append(ring, slots)
    for c in gl.static_range(COUNT if BY_TILE else 1):
        slots = gl.allocate_shared_memory(gl.int32, [SLOTS, gl.num_warps() * (16 // PARTS), PARTS * BITS // 32], FLAT)
        kept = append(kept, slots)
    for s in gl.static_range(SLOTS):
        copy_lines(ring, word_ptr, s, first + s * (BLOCKS * ROWS), end, num_rows, NUM, ROWS, PARTS, SPLITS, LINES)
        copy_factors(kept, scale_ptr, s, first + s * (BLOCKS * ROWS), end, num_rows, K, INPUTS, GROUP_ROWS, GROUP, ROWS, PARTS, SPLITS)
        async_copy.commit_group()
    wait_for_inputs(PDL)
    rights, factor = ready(x_ptr, columns_ptr, stride_x, eps, K, GROUP, KIND, NORM, M, BLOCKS, SPLITS, INPUTS, COUNT, ACC)
    for c in gl.static_range(COUNT if KIND == "int4" else 0):
        less = gl.full([gl.num_warps(), 16, INPUTS], -SHIFT, rights[c].dtype, gl.DotOperandLayout(0, ACC, 2))
        bases = append(bases, mma_v2(less, rights[c], gl.zeros([gl.num_warps(), 16, 8], gl.float32, ACC)))
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    OUT: gl.constexpr = gl.BlockedLayout([1, 1, M], [1, 32, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    row = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, OUT)))[:, None, None] * ROWS
    row += gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :, None]
    at = gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))[None, None, :] * num_rows + row
    slot = 0
    while first < end:
        zeros, words, factors = (), (), ()
        if ZEROS:
            zeros = load_offsets(zero_ptr, factors, first, end, num_rows, K, INPUTS, GROUP, ROWS, PARTS, SPLITS, ACC)
        residual = 0.0
        if RESIDUAL:
            residual = gl.load(residual_ptr + at + first, mask=row + first < end, other=0).to(gl.float32)
        async_copy.wait_group(SLOTS - 1)
        for c in gl.static_range(2 * COUNT):
            words = append(words, ring[c].index(slot).load(LINES))
        for c in gl.static_range(len(kept)):
            scales = kept[c].index(slot)._reinterpret(scale_ptr.dtype.element_ty, [gl.num_warps(), 16], FLAT)
            factors = append(factors, scales.load(gl.SliceLayout(2, ACC)).to(gl.float32)[:, :, None])
        if ABLATE != 2:
         copy_lines(ring, word_ptr, slot, first + SLOTS * (BLOCKS * ROWS), end, num_rows, NUM, ROWS, PARTS, SPLITS, LINES)
        if ABLATE != 2:
         copy_factors(kept, scale_ptr, slot, first + SLOTS * (BLOCKS * ROWS), end, num_rows, K, INPUTS, GROUP_ROWS, GROUP, ROWS, PARTS, SPLITS)
        async_copy.commit_group()
        if ABLATE == 1:
         acc = multiply(words, factors, zeros, (rights[0],), bases, KIND, BY_TILE, ACC)
        else:
         acc = multiply(words, factors, zeros, rights, bases, KIND, BY_TILE, ACC)
        y = sum_parts(acc, BLOCKS, SPLITS, M, ACC)
        if NORM or KIND == "fp8":
            y *= along(factor, y, 2)
        if GATED:
            y = silu_times(y, DTYPE)
        y = gl.convert_layout(y, OUT) + residual
        gl.store(out_ptr + at + first, y.to(DTYPE), mask=row + first < end)
        first, slot = first + BLOCKS * ROWS, (slot + 1) % SLOTS


@gluon.jit
def load_lines(
    word_ptr, scale_ptr, first, end, num_rows, COUNT: gl.constexpr, K: gl.constexpr, NUM: gl.constexpr, INPUTS: gl.constexpr, GROUP_ROWS: gl.constexpr,
    GROUP: gl.constexpr, FACTORS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, SPLITS: gl.constexpr, LAYOUT: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """All words of the lines from `first` on, and their scales."""
    STEP: gl.constexpr = SPLITS * PARTS * WORDS
    place = gl.arange(0, 8 * gl.num_warps(), gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))[None, :]
    words, factors = (), ()
    for c in gl.static_range(COUNT):
        for h in gl.static_range(2):
            line = place % 8 // PARTS + h * (8 // PARTS)
            row = first + place // (8 * SPLITS) * ROWS + line % ROWS
            word = ((place // 8 % SPLITS * PARTS + place % PARTS) * WORDS)[:, None] + column
            ptr = word_ptr + (row + line // ROWS * num_rows).to(gl.int64)[:, None] * NUM + word
            there = (row < end)[:, None]
            if (c + 1) * STEP > NUM:
                there = there & (word + c * STEP < NUM)
            words = append(words, gl.load(ptr + c * STEP, mask=there, other=0, eviction_policy="evict_first"))
    SCALES: gl.constexpr = gl.SliceLayout(2, ACC)
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, SCALES))[:, None]
    place = gl.arange(0, 16, gl.SliceLayout(0, SCALES))[None, :]
    row = first + warp // SPLITS * ROWS + place // PARTS % ROWS
    group = (row + place // PARTS // ROWS * num_rows) // GROUP_ROWS * ((K + GROUP - 1) // GROUP)
    for c in gl.static_range(FACTORS):
        input = ((c * SPLITS + warp % SPLITS) * PARTS + place % PARTS) * INPUTS
        factors = append(factors, gl.load(scale_ptr + (group + input // GROUP), mask=(row < end) & (input < K), other=0))
    return words, factors


@gluon.jit
def few_codes_direct_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, columns_ptr, residual_ptr, out_ptr, stride_x, num_rows, eps, K: gl.constexpr,
    GROUP_ROWS: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr,
    RESIDUAL: gl.constexpr, M: gl.constexpr, SPLITS: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr, ABLATE: gl.constexpr = 0,
):  # fmt: skip
    """As `few_codes_kernel`; program p of P has the p-th of P equal shares of the outputs."""
    let_next_start(PDL)
    BLOCKS: gl.constexpr = gl.num_warps() // SPLITS
    PARTS: gl.constexpr = 8 // M
    ROWS: gl.constexpr = 16 // PARTS // (1 + GATED)
    NUM: gl.constexpr = K // 8 if KIND == "int4" else K // 4
    INPUTS: gl.constexpr = WORDS * (K // NUM)
    COUNT: gl.constexpr = (NUM + SPLITS * PARTS * WORDS - 1) // (SPLITS * PARTS * WORDS)
    BY_TILE: gl.constexpr = GROUP < K or KIND == "int4"
    BITS: gl.constexpr = scale_ptr.dtype.element_ty.primitive_bitwidth
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ZEROS: gl.constexpr = zero_ptr is not None
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, 8])
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    share, rest = num_rows // gl.num_programs(0), num_rows % gl.num_programs(0)
    first = gl.program_id(0) * share + gl.minimum(gl.program_id(0), rest)
    end = first + share + (gl.program_id(0) < rest).to(gl.int32)
    FACTORS: gl.constexpr = COUNT if BY_TILE else 1
    bases = ()
    words, raw = load_lines(word_ptr, scale_ptr, first, end, num_rows, COUNT, K, NUM, INPUTS, GROUP_ROWS, GROUP, FACTORS, ROWS, PARTS, SPLITS, LINES, ACC)
    wait_for_inputs(PDL)
    rights, factor = ready(x_ptr, columns_ptr, stride_x, eps, K, GROUP, KIND, NORM, M, BLOCKS, SPLITS, INPUTS, COUNT, ACC)
    for c in gl.static_range(COUNT if KIND == "int4" else 0):
        less = gl.full([gl.num_warps(), 16, INPUTS], -SHIFT, rights[c].dtype, gl.DotOperandLayout(0, ACC, 2))
        bases = append(bases, mma_v2(less, rights[c], gl.zeros([gl.num_warps(), 16, 8], gl.float32, ACC)))
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    OUT: gl.constexpr = gl.BlockedLayout([1, 1, M], [1, 32, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    row = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, OUT)))[:, None, None] * ROWS
    row += gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :, None]
    at = gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))[None, None, :] * num_rows + row
    while first < end:
        zeros, factors = (), ()
        if SLOTS > 1:
            next_words, next_raw = load_lines(word_ptr, scale_ptr, first + BLOCKS * ROWS, end, num_rows, COUNT, K, NUM, INPUTS, GROUP_ROWS, GROUP, FACTORS, ROWS, PARTS, SPLITS, LINES, ACC)
        if ZEROS:
            zeros = load_offsets(zero_ptr, factors, first, end, num_rows, K, INPUTS, GROUP, ROWS, PARTS, SPLITS, ACC)
        residual = 0.0
        if RESIDUAL:
            residual = gl.load(residual_ptr + at + first, mask=row + first < end, other=0).to(gl.float32)
        for c in gl.static_range(len(raw)):
            factors = append(factors, raw[c].to(gl.float32)[:, :, None])
        acc = multiply(words, factors, zeros, rights, bases, KIND, BY_TILE, ACC)
        if SLOTS == 1:
            next_words, next_raw = load_lines(word_ptr, scale_ptr, first + BLOCKS * ROWS, end, num_rows, COUNT, K, NUM, INPUTS, GROUP_ROWS, GROUP, FACTORS, ROWS, PARTS, SPLITS, LINES, ACC)
        y = sum_parts(acc, BLOCKS, SPLITS, M, ACC)
        if NORM or KIND == "fp8":
            y *= along(factor, y, 2)
        if GATED:
            y = silu_times(y, DTYPE)
        y = gl.convert_layout(y, OUT) + residual
        gl.store(out_ptr + at + first, y.to(DTYPE), mask=row + first < end)
        words, raw, first = next_words, next_raw, first + BLOCKS * ROWS


WARPS, SLOTS, PROGRAMS = 8, 2, 1
ABLATE = 0
DIRECT = False


def tile_of(num_tokens: int, width: int, kind: str) -> dict[str, int]:
    """SPLITS and SLOTS."""
    chunks, most = triton.cdiv(width, 128 if kind == "int4" else 64), 3 if kind == "int4" else 5
    splits = min(WARPS, triton.next_power_of_2(triton.cdiv(chunks * num_tokens, 8 * most)))
    return {"SPLITS": splits, "SLOTS": SLOTS}


def few_codes_hopper(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    block: tuple[int, int],
    kind: str,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `few_codes`."""
    num_tokens, width = x.shape
    rows = len(words) // (1 + gated)
    out = x.new_empty(num_tokens, rows)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    (few_codes_direct_kernel if DIRECT else few_codes_hopper_kernel)[(processors * PROGRAMS,)](
        x, words, scales, zeros, columns, out if residual is None else residual, out, x.stride(0), rows, norm_eps or 0.0,
        K=width, GROUP_ROWS=block[0], GROUP=block[1], KIND=kind, NORM=norm_eps is not None, GATED=gated,
        RESIDUAL=residual is not None, M=num_tokens, **tile_of(num_tokens, width, kind), num_warps=WARPS, ABLATE=ABLATE,
        **launch_options(x.device, num_tokens),
    )  # fmt: skip
    return out
