"""Numbers of 8 bits in a KV cache: how a kernel writes them, and how it takes them into its products.

E4M3 has a sign, four bits of exponent and three of mantissa: two to eight sixteenths of a number's own size lie between
neighbours, and the largest is 448 (Micikevicius et al., 2022, "FP8 Formats for Deep Learning").
"""

from __future__ import annotations

import triton
import triton.language as tl

from folovllm.kernels.online_softmax import online_softmax_tile

LARGEST = tl.constexpr(448.0)
SMALLEST_NORMAL = tl.constexpr(2.0**-6)  # below, the distance between neighbours no longer shrinks


@triton.jit
def to_cache(x, factor, cache_ptr):
    """`x` as the cache behind `cache_ptr` keeps it: times `factor` and in 8 bits, or unchanged in a cache of its own dtype.

    It is rounded to E4M3 by arithmetic, half to even, before the cast, which has nothing left to round: what Triton's
    interpreter casts comes out wrong where a mantissa overflows. What is too large becomes the largest number.
    """
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32) * factor, -LARGEST), LARGEST)
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # of two, at or below |x|
        magic = tl.maximum(power, SMALLEST_NORMAL) * (
            0.125 * 12582912.0
        )  # 1.5 * 2**23 steps: no bit below a step is kept
        x = (x + magic) - magic
    return x.to(cache_ptr.dtype.element_ty)


@triton.jit
def fold_tile(q, k, v, visible, row_max, row_sum, acc, scale):
    """`online_softmax_tile` of K/V as the cache keeps them; products are taken in the dtype of `q`."""
    return online_softmax_tile(q, k.to(q.dtype), v.to(q.dtype), visible, row_max, row_sum, acc, scale)
