"""The work list of a split-KV decode. The device writes and reads it, so a captured step needs no data from the host."""

from __future__ import annotations

import triton
import triton.language as tl

from folovllm.kernels.window import first_seen

ITEM = tl.constexpr(4)  # int32s of a work item: sequence, chunk, tokens of the sequence, its first partial result
STEP = tl.constexpr(32)  # items that are written at a time


@triton.jit
def chunk_length(
    lens, used, num_programs, max_chunks, HKV: tl.constexpr, TILE: tl.constexpr,
    MIN_CHUNK: tl.constexpr, MAX_CHUNK: tl.constexpr, QUEUE_CHUNK: tl.constexpr, MAX_PARTS: tl.constexpr,
):  # fmt: skip
    """Return the number of keys in a chunk.

    It is the smallest doubling of MIN_CHUNK, up to MAX_CHUNK, at which every item has its own program; else QUEUE_CHUNK. It is
    longer if a sequence would have over MAX_PARTS results to merge, or if there would be more than `max_chunks` chunks.
    `lens` [SEQS]: the keys of each sequence. `used` [SEQS]: the same, but at least 1 for each real sequence.
    """
    chunk = MIN_CHUNK
    while (chunk < MAX_CHUNK) & (tl.sum(tl.cdiv(used, chunk)) * HKV > num_programs):
        chunk *= 2
    if tl.sum(tl.cdiv(used, chunk)) * HKV > num_programs:
        chunk = QUEUE_CHUNK
    chunk = tl.maximum(chunk, tl.maximum(tl.cdiv(tl.max(lens), MAX_PARTS), tl.cdiv(tl.sum(lens), max_chunks)))
    return tl.cdiv(chunk, TILE) * TILE


@triton.jit(do_not_specialize=["num_seqs", "num_programs", "max_chunks"], do_not_specialize_on_alignment=["len_ptr"])
def plan_kernel(
    len_ptr, item_ptr, header_ptr, num_seqs, num_programs, max_chunks,
    HKV: tl.constexpr, TILE: tl.constexpr, SEQS: tl.constexpr,
    MIN_CHUNK: tl.constexpr, MAX_CHUNK: tl.constexpr, QUEUE_CHUNK: tl.constexpr, MAX_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """List one sequence's work items; one program a sequence, and the first writes header = [items, `chunk_length`].

    Full chunks come first, then the last, partial ones from long to short: the shortest work ends the list. A sequence of
    length 0 (padding) gets one empty item, which writes its zeros. SEQS is a power of two from `num_seqs` up. With a
    WINDOW (0: none) chunks are counted from the tile in which the last token's begins.
    """
    seq, i = tl.program_id(0), tl.arange(0, SEQS)
    lens = tl.load(len_ptr + i, mask=i < num_seqs, other=0)  # [SEQS]
    if WINDOW:
        lens -= first_seen(lens - 1, WINDOW, TILE)
    used = tl.where(i < num_seqs, tl.maximum(lens, 1), 0)
    chunk = chunk_length(lens, used, num_programs, max_chunks, HKV, TILE, MIN_CHUNK, MAX_CHUNK, QUEUE_CHUNK, MAX_PARTS)
    full, rest = lens // chunk, lens % chunk
    has_tail = ((rest > 0) | (lens == 0)) & (i < num_seqs)
    num_full = tl.sum(full)
    if seq == 0:
        tl.store(header_ptr, (num_full + tl.sum(has_tail.to(tl.int32))) * HKV)
        tl.store(header_ptr + 1, chunk)

    my_len = tl.load(len_ptr + seq)
    seen = my_len
    if WINDOW:
        seen -= first_seen(my_len - 1, WINDOW, TILE)
    my_full, my_rest = seen // chunk, seen % chunk
    first_partial = tl.sum(tl.where(i < seq, full + has_tail.to(tl.int32), 0))
    first_item = tl.sum(tl.where(i < seq, full, 0))
    for c0 in range(0, my_full, STEP):
        c = c0 + tl.arange(0, STEP)
        _store_item(item_ptr, first_item + c, seq, c, my_len, first_partial, c < my_full)
    if (my_rest > 0) | (my_len == 0):
        longer = has_tail & ((rest > my_rest) | ((rest == my_rest) & (i < seq)))
        _store_item(item_ptr, num_full + tl.sum(longer.to(tl.int32)), seq, my_full, my_len, first_partial, True)


@triton.jit
def _store_item(item_ptr, item, seq, chunk, length, first_partial, mask):
    item_ptr += item * ITEM
    tl.store(item_ptr, seq, mask=mask)
    tl.store(item_ptr + 1, chunk, mask=mask)
    tl.store(item_ptr + 2, length, mask=mask)
    tl.store(item_ptr + 3, first_partial, mask=mask)


@triton.jit
def take_next(queue_ptr, num_items, num_programs):
    """Return a program's next item, or `num_items` if there is none. queue = [items taken, programs that have ended]."""
    following = num_items
    if num_items > num_programs:  # else each program has one item at most, and no queue is needed
        following = num_programs + tl.atomic_add(queue_ptr, 1, sem="relaxed")
    return following


@triton.jit
def leave(queue_ptr, num_items, num_programs):
    """Count the end of a program. The last program resets the queue for the next launch."""
    if num_items > num_programs:  # noqa: SIM102 -- Triton's `and` would evaluate both sides
        if tl.atomic_add(queue_ptr + 1, 1, sem="acq_rel") == num_programs - 1:
            tl.store(queue_ptr, 0)
            tl.store(queue_ptr + 1, 0)
