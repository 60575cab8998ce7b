"""Applies min_p, top_k and top_p to a row without sorting, and samples among the tokens that are kept.

The filters keep all tokens above a threshold, and of those exactly at the threshold the lower ids. There are two launches:

1. `scan`: several programs share a row. They store the largest logit of each GROUP of tokens, and the group's weight.
2. `finish`: one program a row. From the groups it computes a *cut*, a logit below which no token is kept. It reads the few
   groups that reach the cut once more, and lists their tokens above the cut, the candidates. It finds the threshold among
   the candidates and samples from those that are kept.

The search for the threshold is a bisection on the bits of the logits. Each pass counts the candidates at or above a key, or sums
their probability. Probabilities are integers, so sums do not depend on the order, and a seed gives the same text in every run.

If there are too many candidates for the list, `finish` finds the threshold more slowly, and `sample_tokens` samples. Logits are
often equal (bfloat16 has 16 bits), so the threshold is exact, not a number between two logits. For rows without filters the
programs return at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from folovllm.kernels.gumbel_max import gumbel, philox
from folovllm.kernels.penalties import FILTERS, FLAGS, NUM_FIELDS, WORDS, StepRows, adjusted_logits, float_field
from folovllm.sample.sampling_row import RowField

TILE = 4096  # tokens that a program reads at a time
PROGRAMS = 512  # about the number of programs of a launch, each with some tiles of a row
SCAN_WARPS, WARPS = 8, 16  # of a program that scans, and of the one that finishes a row
CAPACITY = 8192  # candidates in a row's list
CHUNK, WIDE_CHUNK = 512, 4096  # candidates that are read at a time, from the list and without it
UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # of a float32, always 0
VIEWS = ["row_ptr", "position_ptr"]  # parts of a step's buffer, which begin anywhere

GROUP = tl.constexpr(32)  # tokens
GATHER = tl.constexpr(2048)  # tokens of groups at or above the cut that are read at a time
COARSE = tl.constexpr(16)  # lower bits that a coarse key drops: the upper half is enough for a cut
LIKELY = tl.constexpr(512)  # coarse keys between the largest logit and the cut: four octaves
LOWEST_KEY = tl.constexpr(-32641)  # the coarse key of -inf
UNIT = tl.constexpr(float(1 << 40))  # the weight of the most likely token; a sum over 2^22 tokens fits 63 bits
LAST_ID = tl.constexpr(0x7FFFFFFF)
LOWEST = tl.constexpr(-0x80000000)  # below every key
BY_COUNT, BY_WEIGHT, BY_ID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the searches, in their order
TEMPERATURE, MIN_P = tl.constexpr(int(RowField.TEMPERATURE)), tl.constexpr(int(RowField.MIN_P))
TOP_K, TOP_P = tl.constexpr(int(RowField.TOP_K)), tl.constexpr(int(RowField.TOP_P))
SEED_LOW, SEED_HIGH = tl.constexpr(int(RowField.SEED_LOW)), tl.constexpr(int(RowField.SEED_HIGH))


@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=VIEWS)
def scan_kernel(
    logits_ptr, field_ptr, line_ptr, mask_ptr, row_ptr, position_ptr, largest_ptr, weight_ptr,
    stride_logits, stride_lines, stride_masks, vocab_size, num_tiles, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the largest of each group of logits and its sum of exp, for rows with top-k, top-p or min-p.

    Program (sequence, part) takes each tile of the sequence whose number modulo the number of parts is `part`.

    It stores the largest logit of each group, and the sum of exp((logit - largest) / temperature): [S, groups] each.
    """
    s, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_index = tl.load(row_ptr + s).to(tl.int64)
    field_ptr += row_index * NUM_FIELDS
    if (tl.load(field_ptr + FLAGS) & FILTERS) == 0:
        return
    row = (
        logits_ptr + s * stride_logits, line_ptr + row_index * stride_lines, mask_ptr + s * stride_masks, field_ptr,
        tl.load(position_ptr + s), vocab_size,
    )  # fmt: skip
    out, inverse = s * num_tiles * (WIDTH // GROUP), 1.0 / float_field(field_ptr, TEMPERATURE)
    for tile in range(part, num_tiles, tl.num_programs(1)):
        g = tile * (WIDTH // GROUP) + tl.arange(0, WIDTH // GROUP)
        index = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = adjusted_logits(row, index)  # [groups, GROUP]
        largest = tl.max(x, 1)
        base = tl.where(largest > float("-inf"), largest, 0.0)
        tl.store(largest_ptr + out + g, largest)
        tl.store(weight_ptr + out + g, tl.sum(tl.exp((x - base[:, None]) * inverse), 1))


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
def least_of_key(key):
    """Return the least float32 with this coarse key."""
    ordered = key << COARSE
    number = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(key > LOWEST_KEY, number, float("-inf"))


@triton.jit
def find_cut(largest, weights, top, target, inverse, BY_COUNT: tl.constexpr):
    """Return a large logit for which the tokens at or above it number `target` at least, or have that weight (not BY_COUNT).

    Of a group that reaches the cut, its largest token counts. Its weight above the cut is at least its total weight less that of
    its other tokens, each at most as heavy as a token at the cut. `weights` are in units of the weight of `top`, the largest logit.
    """
    keys, alone = key_of(largest, COARSE), tl.exp((largest - top) * inverse)
    low, high = tl.full([], LOWEST_KEY, tl.int32), key_of(top, COARSE) + 1
    middle = tl.maximum(high - LIKELY, low)  # the start of the search
    while low < high - 1:
        if BY_COUNT:
            above = tl.where(keys >= middle, 1.0, 0.0)
        else:
            others = (GROUP - 1) * tl.exp((least_of_key(middle) - top) * inverse)
            above = tl.where(keys >= middle, tl.maximum(alone, weights - others), 0.0)
        if tl.sum(above, 0) >= target:
            low = middle
        else:
            high = middle
        middle = (low + high) >> 1
    return least_of_key(low)


@triton.jit
def choose_cut(largest, weights, top, field_ptr, vocab_size, inverse):
    """Return the cut of a row: (logit, whether the weight of tokens below it counts for top_p: not with top_k or min_p).

    With top_k it is the k-th largest of the groups' largest logits. With min_p it is its threshold, less a margin for rounding.
    With top_p alone the tokens above it have that probability, plus a margin for rounding.
    """
    top_k, top_p, min_p = tl.load(field_ptr + TOP_K), float_field(field_ptr, TOP_P), float_field(field_ptr, MIN_P)
    cut, by_count = float("-inf"), (top_k > 0) & (top_k < vocab_size)
    if min_p > 0:
        distance = -tl.log(min_p) / inverse
        cut = top - distance - 1e-5 * (tl.abs(top) + distance)
    if by_count:
        cut = tl.maximum(cut, find_cut(largest, weights, top, top_k.to(tl.float32), inverse, True))
    counts_rest = (min_p <= 0) & (by_count == 0)
    if counts_rest:
        cut = find_cut(largest, weights, top, tl.sum(weights, 0) * top_p * 1.00001, inverse, False)
    return cut, counts_rest


@triton.jit
def list_candidates(row, lists, scale, cut, reaching_ptr, num_reaching, CAPACITY: tl.constexpr):
    """List the candidates of the groups in `reaching_ptr`, ids ascending. Returns their number, and the weight of the groups' other tokens.

    It stops when there are more than CAPACITY.
    """
    vocab_size = row[5]
    value_ptr, scaled_ptr, id_ptr = lists
    i = tl.arange(0, GATHER)
    count, start = num_reaching * 0, num_reaching * 0
    rest = tl.zeros([GATHER], tl.int64)
    while (start < num_reaching * GROUP) & (count <= CAPACITY):
        inside = start + i < num_reaching * GROUP
        group = tl.load(reaching_ptr + (start + i) // GROUP, mask=inside, other=0)
        index = tl.where(inside, group * GROUP + i % GROUP, vocab_size)
        x = adjusted_logits(row, index)
        z = divide(x, scale[0])
        taken = (index < vocab_size) & (x >= cut) & (z >= scale[2])
        rest += tl.where(x < cut, weight(z, scale[1]), 0)
        place = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        kept = taken & (place < CAPACITY)
        tl.store(value_ptr + place, x, mask=kept)
        tl.store(scaled_ptr + place, z, mask=kept)
        tl.store(id_ptr + place, index, mask=kept)
        count += tl.sum(taken.to(tl.int32), 0)
        start += GATHER
    return count, tl.sum(rest, 0)


@triton.jit
def candidates(row, listed, scale, start, CHUNK: tl.constexpr):
    """Return CHUNK candidates from `start` on: (logits, logits / temperature, token ids, mask of those that exist).

    `row` is that of `adjusted_logits`, `listed` is (candidates' logits, scaled logits, ids, their number, whether they are in the
    list), `scale` is (temperature, largest scaled logit, threshold of min_p as a scaled logit).
    """
    value_ptr, scaled_ptr, id_ptr, count, is_listed = listed
    index = start + tl.arange(0, CHUNK)
    inside = index < count
    if not is_listed:  # a constant of the compiled kernel: there is a loop for each case
        x = adjusted_logits(row, index)
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
def at_or_above(row, listed, scale, threshold, key, shift, search, CHUNK: tl.constexpr):
    """Return the number of candidates with at least this key (BY_COUNT) or their weight, without those below `threshold`.

    BY_ID: the weight of candidates above `threshold`, and of those equal to it with at least this key, which is the negative id.
    """
    total = tl.zeros([CHUNK], tl.int64)
    for start in range(0, listed[3], CHUNK):
        x, z, ids, inside = candidates(row, listed, scale, start, CHUNK)
        keys = tl.where(search == BY_ID, -ids, key_of(x, shift))
        counted = inside & (((z >= threshold) & (keys >= key)) | ((z > threshold) & (search == BY_ID)))
        total += tl.where(counted, tl.where(search == BY_COUNT, 1, weight(z, scale[1])), 0)
    return tl.sum(total, 0)


@triton.jit
def find_threshold(row, listed, scale, bounds, shift, rest, CHUNK: tl.constexpr):
    """Return the row's threshold: (scaled logit, last id that is kept among the candidates equal to it).

    `bounds`: a key at or below all kept ones, and a key above all keys. `rest`: the weight of all tokens that are no candidates,
    if only top_p applies.

    There are up to three searches: for the k-th largest logit, for the logit at which the probability reaches top_p, and for the
    last id among equal logits there. Each finds the largest key that reaches its target. They share one loop, because each
    loop over the candidates would be compiled once more.
    """
    field_ptr, vocab_size, threshold, last = row[3], row[5], scale[2], LAST_ID
    top_k, top_p = tl.load(field_ptr + TOP_K), float_field(field_ptr, TOP_P)
    target = top_k.to(tl.int64)
    first = tl.where((top_k > 0) & (top_k < vocab_size), BY_COUNT, BY_WEIGHT)
    for search in range(first, tl.where(top_p < 1, BY_ID + 1, BY_WEIGHT)):
        low, high = bounds[0] - 1, bounds[1]
        if search == BY_ID:
            low, high = 1 - vocab_size, low * 0 + 1
        key = tl.where(search == BY_COUNT, halfway(low, high), LOWEST)  # the total weight comes first
        while low < high - 1:
            amount = at_or_above(row, listed, scale, threshold, key, shift, search, CHUNK)
            if key > LOWEST:
                low, high = tl.where(amount >= target, key, low), tl.where(amount >= target, high, key)
            elif search == BY_WEIGHT:
                target = tl.maximum(((amount + rest).to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)
            elif amount - tl.max(weight(tl.zeros([1], tl.float32) + threshold, scale[1]), 0) < target:
                high = low + 1  # all equal ones are needed to reach the target
            key = halfway(low, high)
        if search == BY_ID:
            last = -low
        elif low >= bounds[0]:  # else fewer than top_k are left, and all are kept
            threshold = tl.max(divide(tl.zeros([1], tl.float32) + number_of(low, shift), scale[0]), 0)
    return threshold, last


@triton.jit
def halfway(low, high):
    """Return the middle of two int32 numbers without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def noise_of(ids, position, seed_low, seed_high, FAST: tl.constexpr):
    """Return the noise of any token ids, in their shape. `gumbel_noise` returns it for consecutive ids."""
    c0, c1, c2, c3 = philox(ids // 4, position, seed_low, seed_high)
    return gumbel(tl.where(ids % 4 < 2, tl.where(ids % 4 == 0, c0, c1), tl.where(ids % 4 == 2, c2, c3)), FAST)


@triton.jit
def sample_candidate(row, listed, scale, threshold, last, CHUNK: tl.constexpr, FAST: tl.constexpr):
    """Return the kept candidate with the largest scaled logit plus noise; of equal ones the lowest id."""
    field_ptr, position = row[3], row[4]
    low, high = tl.load(field_ptr + SEED_LOW), tl.load(field_ptr + SEED_HIGH)
    best, token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for start in range(0, listed[3], CHUNK):
        _, z, ids, inside = candidates(row, listed, scale, start, CHUNK)
        stays = inside & ((z > threshold) | ((z == threshold) & (ids <= last)))
        value = tl.where(stays, z + noise_of(ids, position, low, high, FAST), float("-inf"))
        largest = tl.max(value, 0)
        if largest > best:  # candidates are in the order of their ids
            best = largest
            token = tl.min(tl.where(value == largest, ids, LAST_ID), 0)
    return token


@triton.jit(do_not_specialize=["num_groups"], do_not_specialize_on_alignment=VIEWS)
def finish_kernel(
    logits_ptr, field_ptr, line_ptr, mask_ptr, row_ptr, position_ptr, largest_ptr, weight_ptr, reaching_ptr,
    value_ptr, scaled_ptr, id_ptr, threshold_ptr, last_ptr, token_ptr, stride_logits, stride_lines, stride_masks,
    vocab_size, num_groups, GROUPS: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr, WIDE_CHUNK: tl.constexpr,
    SHIFT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Program (sequence): from the groups it computes the sequence's threshold and last id, and samples its token, [S] each.

    SHIFT: the number of low bits of a float32 that the type of the logits never uses.
    """
    s = tl.program_id(0).to(tl.int64)
    row_index = tl.load(row_ptr + s).to(tl.int64)
    field_ptr += row_index * NUM_FIELDS
    if (tl.load(field_ptr + FLAGS) & FILTERS) == 0:
        return
    row = (
        logits_ptr + s * stride_logits, line_ptr + row_index * stride_lines, mask_ptr + s * stride_masks, field_ptr,
        tl.load(position_ptr + s), vocab_size,
    )  # fmt: skip
    lists = (value_ptr + s * CAPACITY, scaled_ptr + s * CAPACITY, id_ptr + s * CAPACITY)
    g, reaching_ptr = tl.arange(0, GROUPS), reaching_ptr + s * num_groups
    largest = tl.load(largest_ptr + s * num_groups + g, mask=g < num_groups, other=float("-inf"))
    temperature, most = float_field(field_ptr, TEMPERATURE), tl.max(largest, 0)
    inverse, top = 1.0 / temperature, tl.max(divide(tl.zeros([1], tl.float32) + most, temperature), 0)
    scale = (temperature, top, top + tl.log(float_field(field_ptr, MIN_P)))
    weights = tl.load(weight_ptr + s * num_groups + g, mask=g < num_groups, other=0.0)
    weights *= tl.exp((largest - most) * inverse)
    cut, counts_rest = choose_cut(largest, weights, most, field_ptr, vocab_size, inverse)
    reaching = (g < num_groups) & (largest >= cut)
    tl.store(reaching_ptr + tl.cumsum(reaching.to(tl.int32), 0) - 1, g, mask=reaching)
    tl.debug_barrier()  # other threads read what a thread stored
    count, rest = list_candidates(row, lists, scale, cut, reaching_ptr, tl.sum(reaching.to(tl.int32), 0), CAPACITY)
    tl.debug_barrier()
    rest += tl.sum(tl.where(reaching, 0, (weights * UNIT).to(tl.int64)), 0)
    rest = tl.where(counts_rest, rest, 0)
    shift = tl.where((tl.load(field_ptr + FLAGS) & WORDS) != 0, 0, SHIFT)
    bounds = (key_of(cut, shift), key_of(most, shift) + 1)
    if count <= CAPACITY:
        listed = lists + (count, True)  # noqa: RUF005 -- Triton knows no *lists
        threshold, last = find_threshold(row, listed, scale, bounds, shift, rest, CHUNK)
        tl.store(token_ptr + s, sample_candidate(row, listed, scale, threshold, last, CHUNK, FAST))
    else:
        every = lists + (vocab_size, False)  # noqa: RUF005 -- Triton knows no *lists
        threshold, last = find_threshold(row, every, scale, bounds, shift, rest * 0, WIDE_CHUNK)
        tl.store(token_ptr + s, -1)
    tl.store(threshold_ptr + s, threshold)
    tl.store(last_ptr + s, last)


class FilterWorkspace(NamedTuple):
    """Buffers of intermediate and final results, for S sequences at most."""

    largest: torch.Tensor  # [S, groups] float32, the largest logit of each group of tokens
    weights: torch.Tensor  # [S, groups] float32
    reaching: torch.Tensor  # [S, groups] int32, the groups that reach the cut
    values: torch.Tensor  # [S, CAPACITY] float32, candidates' logits
    scaled: torch.Tensor  # [S, CAPACITY] float32, over the temperature
    ids: torch.Tensor  # [S, CAPACITY] int32
    threshold: torch.Tensor  # [S] float32, a logit over the temperature
    last: torch.Tensor  # [S] int32, the last id that is kept among those at the threshold
    tokens: torch.Tensor  # [S] int32, the sampled token; -1: not sampled yet

    @classmethod
    def allocate(cls, num_seqs: int, vocab_size: int, device: torch.device) -> FilterWorkspace:
        """Allocate it for steps of up to `num_seqs` sequences. With 152,000 tokens it takes about 160 KB a sequence."""

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(num_seqs, *shape, dtype=dtype, device=device)

        groups = triton.cdiv(vocab_size, TILE) * (TILE // GROUP.value)
        return cls(
            largest=empty(groups, dtype=torch.float32),
            weights=empty(groups, dtype=torch.float32),
            reaching=empty(groups),
            values=empty(CAPACITY, dtype=torch.float32),
            scaled=empty(CAPACITY, dtype=torch.float32),
            ids=empty(CAPACITY),
            threshold=empty(dtype=torch.float32),
            last=empty(),
            tokens=empty(),
        )


def filter_logits(logits: torch.Tensor, step: StepRows, work: FilterWorkspace) -> None:
    """Find the threshold of each sequence that has FILTERS, and sample a token that is kept.

    A token is kept if its logit (with bias and penalties) over the temperature is above `work.threshold`, or equal to it and its
    id is at most `work.last`. `work.tokens` receives the sampled tokens, or -1 where there were too many candidates. Entries of
    sequences without filters are not changed.
    `logits`: [S, V], any float dtype, rows contiguous.
    """
    num_seqs, vocab_size = logits.shape
    num_groups, strides = work.largest.shape[1], (logits.stride(0), *step.strides, vocab_size)
    scan_kernel[scan_grid(num_seqs, vocab_size)](
        logits, *step, work.largest, work.weights, *strides, triton.cdiv(vocab_size, TILE), WIDTH=TILE, num_warps=SCAN_WARPS,
    )  # fmt: skip
    finish_kernel[(num_seqs,)](
        logits, *step, work.largest, work.weights, work.reaching, work.values, work.scaled, work.ids, work.threshold,
        work.last, work.tokens, *strides, num_groups, GROUPS=triton.next_power_of_2(num_groups), CAPACITY=CAPACITY, CHUNK=CHUNK, WIDE_CHUNK=WIDE_CHUNK, SHIFT=UNUSED_BITS[logits.dtype],
        FAST=not triton.knobs.runtime.interpret, num_warps=WARPS,
    )  # fmt: skip


def scan_grid(num_seqs: int, vocab_size: int) -> tuple[int, int]:
    """Return the grid (sequences, parts) of programs that share the tiles: enough for a GPU, and few for rows without filters."""
    return num_seqs, min(triton.cdiv(vocab_size, TILE), max(PROGRAMS // num_seqs, 1))
