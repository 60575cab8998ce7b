"""Finds the threshold of a row's filters among its candidates, and samples from those above it (see `filter_logits`).

The search is a bisection on the bits of the logits. Each pass counts the candidates at or above a key, or sums their
probability. Probabilities are integers, so sums do not depend on the order. So a seed gives the same text in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from folovllm.kernels.gumbel_max import negative_log, philox_round
from folovllm.kernels.penalties import adjusted_logits, float_field
from folovllm.sampling_row import RowField

UNIT = tl.constexpr(float(1 << 40))  # the weight of the most likely token; a sum over 2^22 tokens fits 63 bits
LAST_ID = tl.constexpr(0x7FFFFFFF)
LOWEST = tl.constexpr(-0x80000000)  # below every key
BY_COUNT, BY_WEIGHT, BY_ID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the searches, in their order
SEED_LOW, SEED_HIGH = tl.constexpr(int(RowField.SEED_LOW)), tl.constexpr(int(RowField.SEED_HIGH))
TOP_K, TOP_P = tl.constexpr(int(RowField.TOP_K)), tl.constexpr(int(RowField.TOP_P))


@triton.jit
def divide(x, scalar):
    """Return x / scalar, rounded as in torch: numbers that are equal there are equal here."""
    return tl.div_rn(x, tl.zeros_like(x) + scalar)


@triton.jit
def key_of(x, shift):
    """Return an int32 key with the order of the float32 `x`. `shift` drops low bits that are the same in all values."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift


@triton.jit
def weight(z, top):
    """Return exp(z - top) in units of 1 / UNIT, int64."""
    return (tl.exp(z - top) * UNIT).to(tl.int64)


@triton.jit
def candidates(row, scale, start, CHUNK: tl.constexpr):
    """Return CHUNK candidates from `start` on: (logits, logits / temperature, token ids, mask of those that exist).

    `row` is (logits, words, fields, position, V, candidates' logits, scaled logits, ids, their number, whether they are in the
    list), `scale` is (temperature, largest scaled logit, threshold of min_p as a scaled logit).
    """
    logits_ptr, word_ptr, field_ptr, position, vocab_size, value_ptr, scaled_ptr, id_ptr, count, is_written = row
    index = start + tl.arange(0, CHUNK)
    inside = index < count
    if not is_written:  # a constant of the compiled kernel: there is a loop for each case
        x = adjusted_logits(logits_ptr, word_ptr, field_ptr, position, index, vocab_size)
        z = divide(x, scale[0])
        ids = index
        inside &= z >= scale[2]
    else:
        x = tl.load(value_ptr + index, mask=inside, other=float("-inf"))
        z = tl.load(scaled_ptr + index, mask=inside, other=float("-inf"))
        ids = tl.load(id_ptr + index, mask=inside, other=0)
    return x, z, ids, inside


@triton.jit
def number_of(key, shift):
    """Return the float32 with this key: the inverse of `key_of`."""
    ordered = (key << shift) | tl.where(key < 0, (1 << shift) - 1, 0)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def at_or_above(row, scale, threshold, key, shift, question, CHUNK: tl.constexpr):
    """Return the number of candidates with at least this key (BY_COUNT) or their weight, without those below `threshold`.

    BY_ID: the weight of candidates above `threshold`, and of those equal to it with at least this key, which is the negative id.
    """
    total = tl.zeros([CHUNK], tl.int64)
    for start in range(0, row[8], CHUNK):
        x, z, ids, inside = candidates(row, scale, start, CHUNK)
        keys = tl.where(question == BY_ID, -ids, key_of(x, shift))
        counted = inside & (((z >= threshold) & (keys >= key)) | ((z > threshold) & (question == BY_ID)))
        total += tl.where(counted, tl.where(question == BY_COUNT, 1, weight(z, scale[1])), 0)
    return tl.sum(total, 0)


@triton.jit
def find_threshold(row, scale, bounds, shift, rest, CHUNK: tl.constexpr):
    """Return the row's threshold: (scaled logit, last id that is kept among the candidates equal to it).

    `bounds`: a key at or below all kept ones, and a key above all keys. `rest`: the weight of all tokens that are no candidates,
    if only top_p applies.

    There are up to three searches: for the k-th largest logit, for the logit at which the probability reaches top_p, and for the
    last id among equal logits there. Each finds the largest key that reaches its target. They share one loop, because each
    loop over the candidates would be compiled once more.
    """
    field_ptr, vocab_size, threshold, last = row[2], row[4], scale[2], LAST_ID
    top_k, top_p = tl.load(field_ptr + TOP_K), float_field(field_ptr, TOP_P)
    target = top_k.to(tl.int64)
    first = tl.where((top_k > 0) & (top_k < vocab_size), BY_COUNT, BY_WEIGHT)
    for question in range(first, tl.where(top_p < 1, BY_ID + 1, BY_WEIGHT)):
        low, high = bounds[0] - 1, bounds[1]
        if question == BY_ID:
            low, high = 1 - vocab_size, low * 0 + 1
        key = tl.where(question == BY_COUNT, halfway(low, high), LOWEST)  # the total weight comes first
        while low < high - 1:
            amount = at_or_above(row, scale, threshold, key, shift, question, CHUNK)
            if key > LOWEST:
                low, high = tl.where(amount >= target, key, low), tl.where(amount >= target, high, key)
            elif question == BY_WEIGHT:
                target = tl.maximum(((amount + rest).to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)
            elif amount - tl.max(weight(tl.zeros([1], tl.float32) + threshold, scale[1]), 0) < target:
                high = low + 1  # all equal ones are needed to reach the target
            key = halfway(low, high)
        if question == BY_ID:
            last = -low
        elif low >= bounds[0]:  # else fewer than top_k are left, and all are kept
            threshold = tl.max(divide(tl.zeros([1], tl.float32) + number_of(low, shift), scale[0]), 0)
    return threshold, last


@triton.jit
def halfway(low, high):
    """Return the middle of two int32 numbers without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def noise_of(ids, seed_low, seed_high, position, FAST: tl.constexpr):
    """Return the noise of any token ids, in their shape. `gumbel_noise` returns it for consecutive ids."""
    c0 = (ids // 4).to(tl.uint32)
    c1, c2, c3 = c0 * 0 + position.to(tl.uint32), c0 * 0, c0 * 0
    k0, k1 = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
        k0, k1 = (k0 + 0x9E3779B9).to(tl.uint32), (k1 + 0xBB67AE85).to(tl.uint32)
    bits = tl.where(ids % 4 < 2, tl.where(ids % 4 == 0, c0, c1), tl.where(ids % 4 == 2, c2, c3))
    exponential = negative_log(((bits >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23)), FAST)
    return -libdevice.fast_logf(exponential) if FAST else -tl.log(exponential)


@triton.jit
def sample_candidate(row, scale, threshold, last, CHUNK: tl.constexpr, FAST: tl.constexpr):
    """Return the kept candidate with the largest scaled logit plus noise; of equal ones the lowest id."""
    field_ptr = row[2]
    low, high = tl.load(field_ptr + SEED_LOW), tl.load(field_ptr + SEED_HIGH)
    best, token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for start in range(0, row[8], CHUNK):
        _, z, ids, inside = candidates(row, scale, start, CHUNK)
        stays = inside & ((z > threshold) | ((z == threshold) & (ids <= last)))
        value = tl.where(stays, z + noise_of(ids, low, high, row[3], FAST), float("-inf"))
        largest = tl.max(value, 0)
        if largest > best:  # candidates are in the order of their ids
            best = largest
            token = tl.min(tl.where(value == largest, ids, LAST_ID), 0)
    return token
