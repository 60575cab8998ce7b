"""The border of a row's filters, searched for among its candidates; the second half of `filter_logits`.

The search is a bisection on the bits of the logits: how many candidates, or how much probability, is at or above a key?
Probabilities are whole numbers, so that sums in any order are equal: whoever wrote the candidates down first, a seed
gives the same text.
"""

from __future__ import annotations

import triton
import triton.language as tl

from folovllm.draw_row import RowField
from folovllm.kernels.penalties import adjusted_logits, float_field

UNIT = tl.constexpr(float(1 << 40))  # the weight of the most likely token; a sum over 2^22 tokens fits 63 bits
LAST_ID = tl.constexpr(0x7FFFFFFF)
TOP_K, TOP_P = tl.constexpr(int(RowField.TOP_K)), tl.constexpr(int(RowField.TOP_P))


@triton.jit
def divide(x, scalar):
    """x / scalar, rounded as torch does it: what is equal there is equal here."""
    return tl.div_rn(x, tl.zeros_like(x) + scalar)


@triton.jit
def key_of(x, shift):
    """An int32 that orders as the float32 `x` does. `shift` drops low bits that are the same in all values."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift


@triton.jit
def weight(z, top):
    """exp(z - top) in units of 1 / UNIT: int64."""
    return (tl.exp(z - top) * UNIT).to(tl.int64)


@triton.jit
def candidates(row, start, CHUNK: tl.constexpr):
    """CHUNK candidates from `start` on: (logits, token ids, which of them exist)."""
    logits_ptr, word_ptr, field_ptr, position, vocab_size, value_ptr, id_ptr, count = row
    index = start + tl.arange(0, CHUNK)
    inside = index < count
    if count == vocab_size:  # all of them: nothing was written down
        x = adjusted_logits(logits_ptr, word_ptr, field_ptr, position, index, vocab_size)
        ids = index
    else:
        x = tl.load(value_ptr + index, mask=inside, other=float("-inf"))
        ids = tl.load(id_ptr + index, mask=inside, other=0)
    return x, ids, inside


@triton.jit
def at_or_above(row, scale, floor, key, shift, WEIGH: tl.constexpr, CHUNK: tl.constexpr):
    """How many candidates have at least this key, or what they weigh; those below `floor` do not count."""
    temperature, top = scale
    total = tl.zeros([CHUNK], tl.int64)
    for start in range(0, row[7], CHUNK):
        x, _, inside = candidates(row, start, CHUNK)
        z = divide(x, temperature)
        counted = inside & (z >= floor) & (key_of(x, shift) >= key)
        total += tl.where(counted, weight(z, top), 0) if WEIGH else counted.to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def border(row, scale, floor, target, bounds, shift, WEIGH: tl.constexpr, CHUNK: tl.constexpr):
    """The largest scaled logit at or above which there are `target` candidates, or this much weight.

    `bounds`: a key at or above which that holds, and one for which it does not. If it holds for no key, the border is
    the least candidate.
    """
    low, high = bounds
    while low + 1 < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # their sum may not fit
        if at_or_above(row, scale, floor, middle, shift, WEIGH, CHUNK) >= target:
            low = middle
        else:
            high = middle
    least = tl.full([CHUNK], float("inf"), tl.float32)
    for start in range(0, row[7], CHUNK):
        x, _, inside = candidates(row, start, CHUNK)
        z = divide(x, scale[0])
        found = inside & (z >= floor) & (key_of(x, shift) >= low)
        least = tl.minimum(least, tl.where(found, z, float("inf")))
    return tl.min(least, 0)


@triton.jit
def last_of_ties(row, scale, value, target, CHUNK: tl.constexpr):
    """Of the tokens whose scaled logit is `value`, the id of the last that is needed to reach the weight `target`."""
    temperature, top = scale
    above, ties = tl.zeros([CHUNK], tl.int64), tl.zeros([CHUNK], tl.int64)
    for start in range(0, row[7], CHUNK):
        x, _, inside = candidates(row, start, CHUNK)
        z = divide(x, temperature)
        above += tl.where(inside & (z > value), weight(z, top), 0)
        ties += (inside & (z == value)).to(tl.int64)
    each = tl.maximum(tl.max(weight(tl.zeros([1], tl.float32) + value, top), 0), 1)
    needed = (target - tl.sum(above, 0) + each - 1) // each
    all_stay = needed >= tl.sum(ties, 0)
    low, high = tl.where(all_stay, LAST_ID - 1, -1), tl.where(all_stay, LAST_ID, row[4] - 1)
    while low + 1 < high:
        middle = low + (high - low) // 2
        count = tl.zeros([CHUNK], tl.int64)
        for start in range(0, row[7], CHUNK):
            x, ids, inside = candidates(row, start, CHUNK)
            count += (inside & (divide(x, temperature) == value) & (ids <= middle)).to(tl.int64)
        if tl.sum(count, 0) >= needed:
            high = middle
        else:
            low = middle
    return high


@triton.jit
def find_border(row, scale, floor, bounds, shift, rest, CHUNK: tl.constexpr):
    """The row's border, from its candidates: (scaled logit, id of the last of those that are equal to it)."""
    field_ptr, vocab_size = row[2], row[4]
    top_k, top_p = tl.load(field_ptr + TOP_K), float_field(field_ptr, TOP_P)
    last = LAST_ID
    if (top_k > 0) & (top_k < vocab_size):
        floor = tl.maximum(floor, border(row, scale, floor, top_k.to(tl.int64), bounds, shift, False, CHUNK))
        rest = rest * 0  # what is below the cut has gone
    if top_p < 1:
        total = rest + at_or_above(row, scale, floor, bounds[0], shift, True, CHUNK)
        target = (total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        floor = border(row, scale, floor, target, bounds, shift, True, CHUNK)
        last = last_of_ties(row, scale, floor, target, CHUNK)
    return floor, last
