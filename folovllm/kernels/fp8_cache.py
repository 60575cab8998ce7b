"""An FP8 KV cache: how a kernel writes its numbers, and how attention reads them.

E4M3 has a sign, four bits of exponent and three of mantissa. The distance between neighbours is a sixteenth to an eighth of a
number's own size, and the largest number is 448 (Micikevicius et al., 2022, "FP8 Formats for Deep Learning").
"""

from __future__ import annotations

import triton
import triton.language as tl

from folovllm.kernels.online_softmax import LOWEST, block_ids, online_softmax_tile, tile_offsets

LARGEST = tl.constexpr(448.0)
# Neighbours are an eighth of a power of two apart. Adding 1.5 * 2**23 times that in float32 rounds away all lower bits.
ROUNDING = tl.constexpr(1.5 * 2.0**20)
SMALLEST_NORMAL = tl.constexpr(2.0**-6)  # below it the distance between neighbours is constant


@triton.jit
def to_cache(x, factor, cache_ptr):
    """Return `x` as the cache at `cache_ptr` stores it: times `factor` and in FP8, or unchanged in a cache of its own dtype.

    Arithmetic rounds it to E4M3, half to even, so that the cast has nothing left to round. The cast of Triton's interpreter is
    wrong where a mantissa overflows. Numbers that are too large become the largest one.
    """
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32) * factor, -LARGEST), LARGEST)
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # of two, at or below |x|
        magic = tl.maximum(power, SMALLEST_NORMAL) * ROUNDING
        x = (x + magic) - magic
    return x.to(cache_ptr.dtype.element_ty)


@triton.jit
def less_offset(key, offset_ptr, place, mask):
    """Return `key` minus the layer's key offset at `place`, or `key` if `offset_ptr` is None."""
    if offset_ptr is not None:
        key = key.to(tl.float32) - tl.load(offset_ptr + place, mask=mask, other=0.0)
    return key


@triton.jit
def prefill_loop_fp8(
    q, row_max, row_sum, acc, k_ptr, v_ptr, table_ptr, positions, first, last, scale,
    MASKED: tl.constexpr, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr,
    B: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """`prefill_loop` over an FP8 cache. Many queries use a tile, so a plain cast is cheap enough here.

    Products are in float16, which holds all FP8 numbers, and to which one instruction converts two of them. They are in float32
    if `q` is.
    """
    q = q if q.dtype == tl.float32 else tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    dims = tl.arange(0, D)
    for token in range(first, last, TILE):
        keys = token + tl.arange(0, TILE)
        blocks = block_ids(table_ptr, token, last, B, TILE)
        offsets = tile_offsets(blocks, token, B, TILE, STRIDE_BLOCK, STRIDE_TOKEN)[:, None] + dims[None, :]
        k = tl.load(k_ptr + offsets, mask=(keys < last)[:, None], other=0.0).to(q.dtype)
        v = tl.load(v_ptr + offsets, mask=(keys < last)[:, None], other=0.0).to(q.dtype)
        visible = (keys[None, :] <= positions[:, None]) & (keys < last)[None, :] if MASKED else True
        row_max, row_sum, acc = online_softmax_tile(q, k, v, visible, row_max, row_sum, acc, scale)
    return row_max, row_sum, acc


# One instruction converts both bytes of an int16 to float16; two more gather the lower ones and the higher ones.
TWO_OF_8 = tl.constexpr("""{ .reg .b16 a, b; .reg .b32 c, d;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 c, a;
    cvt.rn.f16x2.e4m3x2 d, b;
    prmt.b32 $0, c, d, 0x5410;
    prmt.b32 $1, c, d, 0x7632; }""")
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def two_of_8(pair):
    """Return the two FP8 numbers in an int16 as float16: of the lower byte, and of the higher byte."""
    if INTERPRETED:
        low = (pair & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = ((pair >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(TWO_OF_8, "=r,=r,r", [pair], (tl.float16, tl.float16), True, 2)
    return low, high


@triton.jit
def decode_split_fp8(
    q, k_ptr, v_ptr, table_ptr, first, last, scale, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr,
    B: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """`decode_split` over an FP8 cache, whose numbers are loaded in pairs.

    Loads of single bytes are slow: each value took a load of its own (`docs/performance_log.md`). So two neighbouring dimensions
    are loaded as one int16. A product over all dimensions is then the sum of two products, over the even and over the odd
    dimensions. The result is computed in these two halves, too.
    """
    KIND: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16  # of the products
    even_q, odd_q = tl.split(tl.reshape(tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(KIND), [M, D // 2, 2]))
    k_ptr = k_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    v_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    row_max = tl.full([M], LOWEST, tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    even_acc = tl.zeros([M, D // 2], tl.float32)
    odd_acc = tl.zeros([M, D // 2], tl.float32)
    pairs = tl.arange(0, D // 2)[None, :]
    blocks = block_ids(table_ptr, first, last, B, TILE)
    for token in range(first, last, TILE):
        offsets = tile_offsets(blocks, token, B, TILE, STRIDE_BLOCK // 2, STRIDE_TOKEN // 2)[:, None] + pairs
        blocks = block_ids(table_ptr, token + TILE, last, B, TILE)
        inside = token + tl.arange(0, TILE) < last
        k = tl.load(k_ptr + offsets, mask=inside[:, None], other=0)
        v = tl.load(v_ptr + offsets, mask=inside[:, None], other=0)
        even, odd = two_of_8(k)
        scores = tl.dot(even_q, tl.trans(even.to(KIND)), input_precision="ieee")
        scores = tl.dot(odd_q, tl.trans(odd.to(KIND)), scores, input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - new_max[:, None]), tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        row_max, weights = new_max, weights.to(KIND)
        even, odd = two_of_8(v)
        even_acc = tl.dot(weights, even.to(KIND), even_acc * shrink[:, None], input_precision="ieee")
        odd_acc = tl.dot(weights, odd.to(KIND), odd_acc * shrink[:, None], input_precision="ieee")
    return row_max, row_sum, tl.reshape(tl.join(even_acc, odd_acc), [M, D])
