"""One tile of the online softmax, the step that the prefill and the decode kernel share.

Softmax over keys that arrive a tile at a time (Milakov and Gimelshein, 2018; FlashAttention-2, Dao, 2023, section 3.1):
keep for each query the largest score so far, the sum of exp(score - largest) and the sum of values with these weights.
A new tile may raise the largest score; what was summed before is then scaled down once, and nothing is read again.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # kernels use exp2, which the hardware has: scores are scaled by log2(e) too
# Where a running maximum starts. Finite, unlike -inf: a query that sees no key then keeps weight 0, not exp(inf - inf).
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def online_softmax_tile(q, k, v, visible, row_max, row_sum, acc, scale):
    """Fold the keys `k` and values `v` [N, D] of one tile into the running state of the queries `q` [M, D].

    Args:
        visible: which key each query may see, broadcastable to [M, N]; or Python's `True`, for all.
        row_max: [M] float32, the largest scaled score so far; starts at LOWEST.
        row_sum: [M] float32, the sum of exp2(score - row_max); starts at 0.
        acc: [M, D] float32, the sum of exp2(score - row_max) * value; starts at 0.
        scale: the factor on q . k, log2(e) / sqrt(D).

    Returns the new (row_max, row_sum, acc). After the last tile the attention is acc / row_sum. A query that sees no key
    of the tile keeps its state. Products take `input_precision="ieee"` (else float32 is rounded to TF32), and the weights
    are rounded to the dtype of `v` for theirs.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [M, N]
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))  # [M]
    weights = tl.exp2(scores - new_max[:, None])  # [M, N]
    shrink = tl.exp2(row_max - new_max)  # [M]
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def normalize(row_sum, acc):
    """Return acc / row_sum. A query that saw no key (a padded row) gets zeros, not 0 / 0."""
    return acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]


@triton.jit
def block_ids(table_ptr, token, end, B: tl.constexpr, TILE: tl.constexpr):
    """Return the ids of the blocks with tokens `token` to `token + TILE`, int64: one id if they share a block, else [TILE].

    `token` is a multiple of TILE. Table entries for tokens at or past `end` are not read, because they are arbitrary.
    """
    tokens = token if B % TILE == 0 else token + tl.arange(0, TILE)
    return tl.load(table_ptr + tokens // B, mask=tokens < end, other=0).to(tl.int64)


@triton.jit
def tile_offsets(
    blocks, token, B: tl.constexpr, TILE: tl.constexpr, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr
):
    """Return the offsets in a head's cache of the tokens `token` to `token + TILE` of these blocks, [TILE] int64."""
    within = (token % B + tl.arange(0, TILE)) if B % TILE == 0 else (token + tl.arange(0, TILE)) % B
    return blocks * STRIDE_BLOCK + within * STRIDE_TOKEN
