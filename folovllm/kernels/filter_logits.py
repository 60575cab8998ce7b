"""Applies min_p, top_k and top_p to a row without sorting, and samples among the tokens that are kept.

The filters keep all tokens above a threshold, and of those exactly at the threshold the lower ids. There are two launches:

1. `scan`: several programs share a row. They store the largest logit of each GROUP of tokens, and the group's weight.
2. `finish`: one program a row. From the groups it computes a *cut*, a logit below which no token is kept. It reads the few
   groups that reach the cut once more, and lists their tokens above the cut, the candidates. It finds the threshold among
   the candidates (`filter_threshold`) and samples from those that are kept.

If there are too many candidates for the list, it finds the threshold more slowly, and `sample_tokens` samples. Logits are often
equal (bfloat16 has 16 bits), so the threshold is exact, not a number between two logits. For rows without filters the programs
return at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from folovllm.kernels.filter_threshold import (
    TOP_K,
    TOP_P,
    UNIT,
    divide,
    find_threshold,
    key_of,
    sample_candidate,
    weight,
)
from folovllm.kernels.penalties import FILTERS, FLAGS, NUM_FIELDS, WORDS, adjusted_logits, float_field
from folovllm.sampling_row import RowField

TILE = 4096  # tokens that a program reads at a time
PROGRAMS = 512  # about the number of programs of a launch, each with some tiles of a row
SCAN_WARPS, WARPS = 8, 16  # of a program that scans, and of the one that finishes a row
CAPACITY = 8192  # candidates in a row's list
CHUNK, WIDE_CHUNK = 512, 4096  # candidates that are read at a time, from the list and without it
UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # of a float32, always 0

GROUP = tl.constexpr(32)  # tokens
GATHER = tl.constexpr(2048)  # tokens of groups at or above the cut that are read at a time
LIKELY = tl.constexpr(512)  # coarse keys between the largest logit and the cut: four octaves
LOWEST_KEY = tl.constexpr(-32641)  # the coarse key of -inf
TEMPERATURE, MIN_P = tl.constexpr(int(RowField.TEMPERATURE)), tl.constexpr(int(RowField.MIN_P))


@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["row_ptr", "position_ptr"])
def scan_kernel(
    logits_ptr, field_ptr, word_ptr, row_ptr, position_ptr, largest_ptr, weight_ptr, stride_logits, stride_words,
    vocab_size, num_tiles, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (sequence, part) takes every tile of the sequence whose number leaves the rest `part`.

    It stores the largest logit of each group, and the sum of exp((logit - largest) / temperature): [S, groups] each.
    """
    s, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(row_ptr + s).to(tl.int64)
    field_ptr += row * NUM_FIELDS
    if (tl.load(field_ptr + FLAGS) & FILTERS) == 0:
        return
    out, position = s * num_tiles * (WIDTH // GROUP), tl.load(position_ptr + s)
    inverse = 1.0 / float_field(field_ptr, TEMPERATURE)
    for tile in range(part, num_tiles, tl.num_programs(1)):
        g = tile * (WIDTH // GROUP) + tl.arange(0, WIDTH // GROUP)
        index = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = adjusted_logits(
            logits_ptr + s * stride_logits, word_ptr + row * stride_words, field_ptr, position, index, vocab_size
        )  # [groups, GROUP]
        largest = tl.max(x, 1)
        base = tl.where(largest > float("-inf"), largest, 0.0)
        tl.store(largest_ptr + out + g, largest)
        tl.store(weight_ptr + out + g, tl.sum(tl.exp((x - base[:, None]) * inverse), 1))


@triton.jit
def coarse_key(x):
    """Return the upper half of a key, which is enough for a cut."""
    return key_of(x, 16)


@triton.jit
def least_of_key(key):
    """Return the least float32 with this coarse key."""
    ordered = key << 16
    number = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(key > LOWEST_KEY, number, float("-inf"))


@triton.jit
def find_cut(largest, weights, top, target, inverse, BY_COUNT: tl.constexpr):
    """Return a large logit for which the tokens at or above it number `target` at least, or have that weight (not BY_COUNT).

    Of a group that reaches the cut, its largest token counts. Its weight above the cut is at least its total weight less that of
    its other tokens, each at most as heavy as a token at the cut. `weights` are in units of the weight of `top`, the largest logit.
    """
    keys, alone = coarse_key(largest), tl.exp((largest - top) * inverse)
    low, high = tl.full([], LOWEST_KEY, tl.int32), coarse_key(top) + 1
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
    """Return the cut of a row: (logit, whether the weight of tokens below it counts in the sum of top_p).

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
def write_down(row, scale, cut, hot_ptr, num_hot, CAPACITY: tl.constexpr):
    """List the candidates of the groups in `hot_ptr`, ids ascending. Returns their number, and the weight of the groups' other tokens.

    It stops when there are more than CAPACITY.
    """
    logits_ptr, word_ptr, field_ptr, position, vocab_size, value_ptr, scaled_ptr, id_ptr = row
    i = tl.arange(0, GATHER)
    count, start = num_hot * 0, num_hot * 0
    rest = tl.zeros([GATHER], tl.int64)
    while (start < num_hot * GROUP) & (count <= CAPACITY):
        inside = start + i < num_hot * GROUP
        group = tl.load(hot_ptr + (start + i) // GROUP, mask=inside, other=0)
        index = tl.where(inside, group * GROUP + i % GROUP, vocab_size)
        x = adjusted_logits(logits_ptr, word_ptr, field_ptr, position, index, vocab_size)
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


@triton.jit(do_not_specialize=["num_groups"], do_not_specialize_on_alignment=["row_ptr", "position_ptr"])
def finish_kernel(
    logits_ptr, field_ptr, word_ptr, row_ptr, position_ptr, largest_ptr, weight_ptr, hot_ptr, value_ptr, scaled_ptr,
    id_ptr, threshold_ptr, last_ptr, token_ptr, stride_logits, stride_words, vocab_size, num_groups, GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr, WIDE_CHUNK: tl.constexpr, SHIFT: tl.constexpr, FAST: tl.constexpr,
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
        logits_ptr + s * stride_logits, word_ptr + row_index * stride_words, field_ptr, tl.load(position_ptr + s),
        vocab_size, value_ptr + s * CAPACITY, scaled_ptr + s * CAPACITY, id_ptr + s * CAPACITY,
    )  # fmt: skip
    g, hot_ptr = tl.arange(0, GROUPS), hot_ptr + s * num_groups
    largest = tl.load(largest_ptr + s * num_groups + g, mask=g < num_groups, other=float("-inf"))
    temperature, most = float_field(field_ptr, TEMPERATURE), tl.max(largest, 0)
    inverse, top = 1.0 / temperature, tl.max(divide(tl.zeros([1], tl.float32) + most, temperature), 0)
    scale = (temperature, top, top + tl.log(float_field(field_ptr, MIN_P)))
    weights = tl.load(weight_ptr + s * num_groups + g, mask=g < num_groups, other=0.0)
    weights *= tl.exp((largest - most) * inverse)
    cut, counts_rest = choose_cut(largest, weights, most, field_ptr, vocab_size, inverse)
    hot = (g < num_groups) & (largest >= cut)
    tl.store(hot_ptr + tl.cumsum(hot.to(tl.int32), 0) - 1, g, mask=hot)
    tl.debug_barrier()  # other threads read what a thread stored
    count, rest = write_down(row, scale, cut, hot_ptr, tl.sum(hot.to(tl.int32), 0), CAPACITY)
    tl.debug_barrier()
    rest += tl.sum(tl.where(hot, 0, (weights * UNIT).to(tl.int64)), 0)
    rest = tl.where(counts_rest, rest, 0)
    shift = tl.where((tl.load(field_ptr + FLAGS) & WORDS) != 0, 0, SHIFT)
    bounds = (key_of(cut, shift), key_of(most, shift) + 1)
    if count <= CAPACITY:
        source = row + (count, True)  # noqa: RUF005 -- Triton knows no *row
        threshold, last = find_threshold(source, scale, bounds, shift, rest, CHUNK)
        tl.store(token_ptr + s, sample_candidate(source, scale, threshold, last, CHUNK, FAST))
    else:
        source = row + (vocab_size, False)  # noqa: RUF005 -- Triton knows no *row
        threshold, last = find_threshold(source, scale, bounds, shift, rest * 0, WIDE_CHUNK)
        tl.store(token_ptr + s, -1)
    tl.store(threshold_ptr + s, threshold)
    tl.store(last_ptr + s, last)


@dataclass(slots=True)
class FilterWorkspace:
    """Buffers of intermediate and final results, for S sequences at most."""

    largest: torch.Tensor  # [S, groups] float32, the largest logit of each group of tokens
    weights: torch.Tensor  # [S, groups] float32
    hot: torch.Tensor  # [S, groups] int32, groups that reach above the cut
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
            hot=empty(groups),
            values=empty(CAPACITY, dtype=torch.float32),
            scaled=empty(CAPACITY, dtype=torch.float32),
            ids=empty(CAPACITY),
            threshold=empty(dtype=torch.float32),
            last=empty(),
            tokens=empty(),
        )


def filter_logits(
    logits: torch.Tensor,
    fields: torch.Tensor,
    words: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    work: FilterWorkspace,
) -> None:
    """Find the threshold of each sequence that has FILTERS, and sample a token that is kept.

    A token is kept if its logit (with bias and penalties) over the temperature is above `work.threshold`, or equal to it and its
    id is at most `work.last`. `work.tokens` receives the sampled tokens, or -1 where there were too many candidates. Entries of
    sequences without filters are not changed.

    Args:
        logits: [S, V], any float dtype, rows contiguous.
        fields: [rows, len(RowField)] int32. words: [rows, line_width(V)] int32.
        rows: [S] int32. positions: [S] int32, index of the token to sample in its sequence.
    """
    num_seqs, vocab_size = logits.shape
    num_groups, strides = work.largest.shape[1], (logits.stride(0), words.stride(0), vocab_size)
    scan_kernel[parts(num_seqs, vocab_size)](
        logits, fields, words, rows, positions, work.largest, work.weights, *strides, triton.cdiv(vocab_size, TILE),
        WIDTH=TILE, num_warps=SCAN_WARPS,
    )  # fmt: skip
    finish_kernel[(num_seqs,)](
        logits, fields, words, rows, positions, work.largest, work.weights, work.hot, work.values, work.scaled, work.ids,
        work.threshold, work.last, work.tokens, *strides, num_groups, GROUPS=triton.next_power_of_2(num_groups),
        CAPACITY=CAPACITY, CHUNK=CHUNK, WIDE_CHUNK=WIDE_CHUNK, SHIFT=UNUSED_BITS[logits.dtype],
        FAST=not triton.knobs.runtime.interpret, num_warps=WARPS,
    )  # fmt: skip


def parts(num_seqs: int, vocab_size: int) -> tuple[int, int]:
    """Return the grid (sequences, parts) of programs that share the tiles: enough for a GPU, and few for rows without filters."""
    return num_seqs, min(triton.cdiv(vocab_size, TILE), max(PROGRAMS // num_seqs, 1))
