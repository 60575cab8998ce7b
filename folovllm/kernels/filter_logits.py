"""Which tokens of a row survive min_p, top_k and top_p: a value and an id, found without sorting.

What survives is always "more likely than a border, and of those exactly at the border the lower ids". Two launches find
it; several programs share a row, and whoever finishes a row last goes on alone:

1. `scan`: a histogram of the row's logits. From it, a cut below which certainly nothing survives.
2. `search`: the few tokens above the cut are written down, and the border is searched for among them, by bisection on
   the bits of their logits: how many, or how much probability, is at or above a key?

Logits tie often (bfloat16 has 16 bits), so a border is exact, not a number between two logits. Rows without filters cost
a program that returns at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from folovllm.draw_row import RowField
from folovllm.kernels.filter_border import TOP_K, TOP_P, divide, find_border, key_of, weight
from folovllm.kernels.penalties import FILTERS, FLAGS, NUM_FIELDS, WORDS, adjusted_logits, float_field

TILE = 4096  # tokens of a program
CAPACITY = 8192  # candidates that a row can write down; with more, the search reads the row's logits again
CHUNK = 1024  # candidates looked at in one go

BINS = tl.constexpr(2048)  # of the histogram, each 1/8 wide, from -128 to 128; what lies outside is in the outermost
LOWEST, PER_UNIT = tl.constexpr(-128.0), tl.constexpr(8.0)
SLACK = tl.constexpr(0.99)  # for the rounding of float32 sums
TEMPERATURE, MIN_P = tl.constexpr(int(RowField.TEMPERATURE)), tl.constexpr(int(RowField.MIN_P))

UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # of a float32 that holds such a number


@triton.jit
def bin_of(x):
    """The bin of each value, 0 to BINS - 1."""
    place = tl.floor((tl.maximum(x, LOWEST) - LOWEST) * PER_UNIT)
    return tl.minimum(place, BINS - 1.0).to(tl.int32)


@triton.jit
def lower_edge(b):
    """The least value in bin b."""
    return tl.where(b > 0, LOWEST + b.to(tl.float32) / PER_UNIT, float("-inf"))


@triton.jit
def find_cut(bin_ptr, field_ptr, top, vocab_size):
    """A logit below which nothing survives, from the row's histogram and its largest logit `top`.

    top_k: the lower edge of the bin in which the k-th largest is; top_p then goes by the weight of what is above. top_p
    alone: what is below the cut has at most 1 - top_p of the probability, even if each token were as likely as its bin
    allows and all others as unlikely. min_p alone, whose border is known: inf, for there is nothing to search for.
    """
    b = tl.arange(0, BINS)
    counts = tl.load(bin_ptr + b)
    top_k, top_p = tl.load(field_ptr + TOP_K), float_field(field_ptr, TOP_P)
    cut = float("inf")
    if (top_k > 0) & (top_k < vocab_size):
        at_or_above = tl.cumsum(counts, 0, reverse=True)
        cut = lower_edge(tl.sum((at_or_above >= top_k).to(tl.int32)) - 1)
    elif top_p < 1:
        temperature = float_field(field_ptr, TEMPERATURE)
        some = counts > 0  # an empty bin above `top` would overflow
        least = tl.where(some, tl.exp((lower_edge(b) - top) / temperature), 0.0) * counts.to(tl.float32)
        edge = tl.minimum(lower_edge(b + 1), top)
        most = tl.where(some, tl.exp((edge - top) / temperature), 0.0) * counts.to(tl.float32)
        tail = tl.cumsum(most, 0) <= (1 - top_p) * tl.sum(least) * SLACK
        cut = lower_edge(tl.sum(tail.to(tl.int32)))
    return cut


@triton.jit(
    do_not_specialize=["vocab_size"], do_not_specialize_on_alignment=["row_ptr", "position_ptr"]
)  # fmt: skip
def scan_kernel(
    logits_ptr, field_ptr, word_ptr, row_ptr, position_ptr, tops_ptr, bin_ptr, done_ptr, cut_ptr, top_ptr,
    stride_logits, stride_words, vocab_size, WIDTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Program (sequence, tile): its tokens go into the sequence's histogram; the last finds `cut` and `top` [S]."""
    s, tile, num_tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = tl.load(row_ptr + s).to(tl.int64)
    field_ptr += row * NUM_FIELDS
    if (tl.load(field_ptr + FLAGS) & FILTERS) == 0:
        return
    index = tile * WIDTH + tl.arange(0, WIDTH)
    x = adjusted_logits(
        logits_ptr + s * stride_logits, word_ptr + row * stride_words, field_ptr, tl.load(position_ptr + s), index,
        vocab_size,
    )  # fmt: skip
    tl.store(tops_ptr + s * num_tiles + tile, tl.max(x, 0))
    counts = tl.histogram(bin_of(x), BINS, mask=index < vocab_size)
    bin_ptr += s * BINS
    b = tl.arange(0, BINS)
    tl.atomic_add(bin_ptr + b, counts, mask=counts > 0, sem="relaxed")
    tl.debug_barrier()  # all threads have added before one of them says so
    if tl.atomic_add(done_ptr + s, 1, sem="acq_rel") == num_tiles - 1:
        t = tl.arange(0, TILES)
        top = tl.max(tl.load(tops_ptr + s * num_tiles + t, mask=t < num_tiles, other=float("-inf")), 0)
        tl.store(cut_ptr + s, find_cut(bin_ptr, field_ptr, top, vocab_size))
        tl.store(top_ptr + s, top)
        tl.store(bin_ptr + b, tl.zeros([BINS], tl.int32))  # as the next step expects it
        tl.store(done_ptr + s, 0)


@triton.jit(
    do_not_specialize=["vocab_size"], do_not_specialize_on_alignment=["row_ptr", "position_ptr"]
)  # fmt: skip
def search_kernel(
    logits_ptr, field_ptr, word_ptr, row_ptr, position_ptr, cut_ptr, top_ptr, value_ptr, id_ptr, count_ptr, rest_ptr,
    done_ptr, floor_ptr, last_ptr, stride_logits, stride_words, vocab_size,
    WIDTH: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Program (sequence, tile): writes down its candidates; the last finds the border, `floor` and `last` [S].

    SHIFT: how many low bits of a float32 are never used by the type of the logits.
    """
    s, tile, num_tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = tl.load(row_ptr + s).to(tl.int64)
    field_ptr += row * NUM_FIELDS
    flags = tl.load(field_ptr + FLAGS)
    if (flags & FILTERS) == 0:
        return
    logits_ptr += s * stride_logits
    word_ptr += row * stride_words
    value_ptr += s * CAPACITY
    id_ptr += s * CAPACITY
    position, temperature = tl.load(position_ptr + s), float_field(field_ptr, TEMPERATURE)
    index = tile * WIDTH + tl.arange(0, WIDTH)
    x = adjusted_logits(logits_ptr, word_ptr, field_ptr, position, index, vocab_size)
    z = divide(x, temperature)
    cut, most = tl.load(cut_ptr + s), tl.load(top_ptr + s)
    top = tl.max(divide(tl.zeros([1], tl.float32) + most, temperature), 0)
    floor = top + tl.log(float_field(field_ptr, MIN_P))
    alive = (index < vocab_size) & (z >= floor)
    taken = alive & (x >= cut)
    place = tl.cumsum(taken.to(tl.int32), 0)
    count = tl.max(place, 0)
    if count > 0:
        place += tl.atomic_add(count_ptr + s, count, sem="relaxed") - 1
        kept = taken & (place < CAPACITY)
        tl.store(value_ptr + place, x, mask=kept)
        tl.store(id_ptr + place, index, mask=kept)
    if float_field(field_ptr, TOP_P) < 1:
        tl.atomic_add(rest_ptr + s, tl.sum(tl.where(alive & (x < cut), weight(z, top), 0), 0), sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(done_ptr + s, 1, sem="acq_rel") == num_tiles - 1:
        count, rest = tl.load(count_ptr + s), tl.load(rest_ptr + s)
        count = tl.where(count > CAPACITY, vocab_size, count)
        shift = tl.where((flags & WORDS) != 0, 0, SHIFT)
        source = (logits_ptr, word_ptr, field_ptr, position, vocab_size, value_ptr, id_ptr, count)
        bounds = (key_of(cut, shift), key_of(most, shift) + 1)
        floor, last = find_border(source, (temperature, top), floor, bounds, shift, rest, CHUNK)
        tl.store(floor_ptr + s, floor)
        tl.store(last_ptr + s, last)
        tl.store(count_ptr + s, 0)  # as the next step expects it
        tl.store(rest_ptr + s, rest * 0)
        tl.store(done_ptr + s, 0)


@dataclass(slots=True)
class FilterWorkspace:
    """What the launches tell each other, for S sequences at most. Its counters are zero between two steps."""

    tops: torch.Tensor  # [S, tiles] float32
    bins: torch.Tensor  # [S, BINS] int32
    done: torch.Tensor  # [S] int32, programs that have finished
    cut: torch.Tensor  # [S] float32
    top: torch.Tensor  # [S] float32
    values: torch.Tensor  # [S, CAPACITY] float32, candidates' logits
    ids: torch.Tensor  # [S, CAPACITY] int32
    count: torch.Tensor  # [S] int32
    rest: torch.Tensor  # [S] int64, weight of what is below the cut
    floor: torch.Tensor  # [S] float32, the border: a logit over the temperature
    last: torch.Tensor  # [S] int32, the last id that survives among those at the border

    @classmethod
    def allocate(cls, num_seqs: int, vocab_size: int, device: torch.device) -> FilterWorkspace:
        """For steps of up to `num_seqs` sequences: about 74 KB for each."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(num_seqs, *shape, dtype=dtype, device=device)

        return cls(
            tops=zeros(triton.cdiv(vocab_size, TILE), dtype=torch.float32),
            bins=zeros(BINS.value),
            done=zeros(),
            cut=zeros(dtype=torch.float32),
            top=zeros(dtype=torch.float32),
            values=zeros(CAPACITY, dtype=torch.float32),
            ids=zeros(CAPACITY),
            count=zeros(),
            rest=zeros(dtype=torch.int64),
            floor=zeros(dtype=torch.float32),
            last=zeros(),
        )


def filter_logits(
    logits: torch.Tensor,
    fields: torch.Tensor,
    words: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    work: FilterWorkspace,
) -> None:
    """Find what survives the filters of each sequence that has FILTERS: `work.floor` and `work.last`.

    A token survives if its logit (with bias and penalties) over the temperature is above `floor`, or equal to it and
    its id is `last` at most. Entries of sequences without filters are left as they are.

    Args:
        logits: [S, V], any float dtype, rows contiguous.
        fields: [rows, len(RowField)] int32. words: [rows, V] int32.
        rows: [S] int32. positions: [S] int32, index of the token to draw in its sequence.
    """
    num_seqs, vocab_size = logits.shape
    grid = (num_seqs, triton.cdiv(vocab_size, TILE))
    strides = (logits.stride(0), words.stride(0), vocab_size)
    scan_kernel[grid](
        logits, fields, words, rows, positions, work.tops, work.bins, work.done, work.cut, work.top, *strides,
        WIDTH=TILE, TILES=triton.next_power_of_2(grid[1]), num_warps=8,
    )  # fmt: skip
    search_kernel[grid](
        logits, fields, words, rows, positions, work.cut, work.top, work.values, work.ids, work.count, work.rest,
        work.done, work.floor, work.last, *strides,
        WIDTH=TILE, CAPACITY=CAPACITY, CHUNK=CHUNK, SHIFT=UNUSED_BITS[logits.dtype], num_warps=8,
    )  # fmt: skip
