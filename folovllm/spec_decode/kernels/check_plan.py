"""The work list of `SplitKVCheck`, written on the device: the new tokens of all sequences in tiles, then their chunks of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from folovllm.kernels.decode_plan import plan_kernel

PLACE = tl.constexpr(3)  # int32s that say where a tile is: its sequence, its first token in the batch, how many tokens


@triton.jit(do_not_specialize_on_alignment=["start_ptr", "len_ptr"])
def list_checks_kernel(
    start_ptr, len_ptr, place_ptr, end_ptr, count_ptr, TILE_TOKENS: tl.constexpr, WIDTH: tl.constexpr
):
    """Program (sequence): its tiles of up to TILE_TOKENS new tokens, in order, behind those of the sequences before it.

    `start_ptr` [S+1] says where the new tokens of each sequence start, `len_ptr` [S] how many tokens it has; those of a
    sequence of length 0 are padding and get no tile. Of each tile: its place, and in `end_ptr` how many keys its last token
    sees. The last program writes how many tiles there are.
    """
    seq, i = tl.program_id(0), tl.arange(0, WIDTH)
    before = 0
    for first in range(0, seq, WIDTH):
        s = first + i
        new = tl.load(start_ptr + s + 1, mask=s < seq, other=0) - tl.load(start_ptr + s, mask=s < seq, other=0)
        real = tl.minimum(new, tl.load(len_ptr + s, mask=s < seq, other=0))
        before += tl.sum(tl.cdiv(real, TILE_TOKENS))
    start, length = tl.load(start_ptr + seq), tl.load(len_ptr + seq)
    new = tl.load(start_ptr + seq + 1) - start
    mine = tl.cdiv(tl.minimum(new, length), TILE_TOKENS)
    for first in range(0, mine, WIDTH):
        t = first + i
        inside, done = t < mine, t * TILE_TOKENS
        count = tl.minimum(TILE_TOKENS, new - done)
        place = place_ptr + (before + t) * PLACE
        tl.store(place, seq, mask=inside)
        tl.store(place + 1, start + done, mask=inside)
        tl.store(place + 2, count, mask=inside)
        tl.store(end_ptr + before + t, length - new + done + count, mask=inside)
    if seq == tl.num_programs(0) - 1:
        tl.store(count_ptr, before + mine)
        if before + mine == 0:
            tl.store(end_ptr, 0)  # which the plan of nothing looks at


@triton.jit(do_not_specialize=["num_programs", "max_chunks"])
def plan_checks_kernel(
    count_ptr, end_ptr, item_ptr, header_ptr, num_programs, max_chunks,
    HKV: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    MIN_CHUNK: tl.constexpr, MAX_CHUNK: tl.constexpr, QUEUE_CHUNK: tl.constexpr, MAX_PARTS: tl.constexpr,
):  # fmt: skip
    """`plan_kernel` of the listed tiles, as if each were a sequence. There may be fewer than programs."""
    count = tl.load(count_ptr)
    if tl.program_id(0) < tl.maximum(count, 1):
        plan_kernel(
            end_ptr, item_ptr, header_ptr, count, num_programs, max_chunks, HKV=HKV, TILE=TILE, SEQS=TILES,
            MIN_CHUNK=MIN_CHUNK, MAX_CHUNK=MAX_CHUNK, QUEUE_CHUNK=QUEUE_CHUNK, MAX_PARTS=MAX_PARTS, WINDOW=0,
        )  # fmt: skip
