"""What a draft head reads in a step, and what a chain begins with, in three launches in place of eighty.

`pairing` has the same two functions in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.electives.spec_decode.heads import KeptStates
from folovllm.step.forward_batch import ForwardBatch


@triton.jit
def sequence_of(start_ptr, token, num_seqs, SEQS: tl.constexpr):
    """Return the sequence of a token of the step: the number of sequences that end before it."""
    seq, i = 0, tl.arange(0, SEQS)
    for first in range(0, num_seqs, SEQS):
        ends = tl.load(start_ptr + 1 + first + i, mask=first + i < num_seqs, other=2147483647)
        seq += tl.sum((ends <= token).to(tl.int32))
    return seq


@triton.jit(do_not_specialize=["num_seqs", "stride_table"])
def pair_up_kernel(
    own_ptr, kept_ptr, kept_position_ptr, start_ptr, row_ptr, position_ptr, slot_ptr, table_ptr, hidden_ptr,
    pair_position_ptr, pair_slot_ptr, num_seqs, stride_table, DEPTH: tl.constexpr, B: tl.constexpr, H: tl.constexpr,
    WIDTH: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Program (token): the pair's hidden state, position and slot. The slot is -1 where there is no pair."""
    token = tl.program_id(0)
    seq = sequence_of(start_ptr, token, num_seqs, SEQS)
    before = tl.load(position_ptr + token) - 1
    is_first = token == tl.load(start_ptr + seq)
    place = tl.load(row_ptr + seq).to(tl.int64) * DEPTH + tl.maximum(before, 0) % DEPTH
    is_pair = (tl.load(slot_ptr + token) >= 0) & (before >= 0)
    if is_first:
        is_pair = is_pair & (tl.load(kept_position_ptr + place) == before)
        source = kept_ptr + place * H
    else:
        source = own_ptr + (token - 1).to(tl.int64) * H
    before = tl.maximum(before, 0)
    tl.store(pair_position_ptr + token, before)
    block = tl.load(table_ptr + seq.to(tl.int64) * stride_table + before // B, mask=is_pair, other=0).to(tl.int64)
    tl.store(pair_slot_ptr + token, tl.where(is_pair, block * B + before % B, -1))
    for first in range(0, H, WIDTH):
        i = first + tl.arange(0, WIDTH)
        state = tl.load(source + i, mask=i < H)
        tl.store(hidden_ptr + token.to(tl.int64) * H + i, state, mask=i < H)


@triton.jit(do_not_specialize=["num_seqs"])
def keep_kernel(
    own_ptr, kept_ptr, kept_position_ptr, start_ptr, row_ptr, position_ptr, slot_ptr, len_ptr, num_seqs,
    DEPTH: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Program (token): keeps its hidden state if it is among its sequence's last DEPTH tokens."""
    token = tl.program_id(0)
    seq = sequence_of(start_ptr, token, num_seqs, SEQS)
    position = tl.load(position_ptr + token)
    if (tl.load(slot_ptr + token) >= 0) & (position >= tl.load(len_ptr + seq) - DEPTH):
        place = tl.load(row_ptr + seq).to(tl.int64) * DEPTH + position % DEPTH
        tl.store(kept_position_ptr + place, position)
        for first in range(0, H, WIDTH):
            i = first + tl.arange(0, WIDTH)
            state = tl.load(own_ptr + token.to(tl.int64) * H + i, mask=i < H)
            tl.store(kept_ptr + place * H + i, state, mask=i < H)


@triton.jit(do_not_specialize=["k", "first_spare", "max_blocks", "stride_table"])
def chain_start_kernel(
    len_ptr, position_ptr, row_ptr, table_ptr, kept_ptr, out_table_ptr, out_position_ptr, slot_ptr, out_len_ptr, hidden_ptr,
    k, first_spare, max_blocks, stride_table, SPARE: tl.constexpr, DEPTH: tl.constexpr, B: tl.constexpr, H: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (sequence): its table with spare blocks, positions and slots of its pairs, and the first pair's hidden state."""
    seq, num_seqs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    row = tl.load(row_ptr + seq).to(tl.int64)
    is_real = tl.load(len_ptr + seq) > 0
    newest = tl.where(is_real, tl.load(position_ptr + seq), 0)
    num_own, spare = tl.cdiv(newest, B), first_spare + row * SPARE
    for first in range(0, max_blocks, WIDTH):
        i = first + tl.arange(0, WIDTH)
        own = tl.load(table_ptr + seq * stride_table + i, mask=i < tl.minimum(num_own, max_blocks), other=0)
        block = tl.where(i < num_own, own, spare + tl.minimum(i - num_own, SPARE - 1))
        tl.store(out_table_ptr + seq * max_blocks + i, block.to(tl.int32), mask=i < max_blocks)
    for step in range(0, k):
        position = tl.minimum(tl.maximum(newest - 1 + step, 0), max_blocks * B - 1)
        at = position // B
        own = tl.load(table_ptr + seq * stride_table + at, mask=at < num_own, other=0)
        block = tl.where(at < num_own, own, spare + tl.minimum(at - num_own, SPARE - 1))
        tl.store(out_position_ptr + step * num_seqs + seq, position)
        tl.store(slot_ptr + step * num_seqs + seq, tl.where(is_real, block.to(tl.int64) * B + position % B, -1))
        tl.store(out_len_ptr + step * num_seqs + seq, tl.where(is_real, position + 1, 0).to(tl.int32))
    place = row * DEPTH + tl.maximum(newest - 1, 0) % DEPTH
    for first in range(0, H, WIDTH):
        i = first + tl.arange(0, WIDTH)
        tl.store(hidden_ptr + seq * H + i, tl.load(kept_ptr + place * H + i, mask=i < H), mask=i < H)


def start_chain(
    batch: ForwardBatch, k: int, kept: KeptStates, block_size: int, first_spare: int, num_spare: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `pairing.start_chain` returns. Sequences of padding have tables and states of any value."""
    (num_seqs, max_blocks), hidden, on = batch.block_tables.shape, kept.hidden.shape[2], batch.positions.device
    assert batch.rows is not None
    # Each of its own memory: where a tensor begins at a multiple of 16 bytes, Triton compiles another kernel than elsewhere.
    positions, slots = (torch.empty(k, num_seqs, dtype=torch.int64, device=on) for _ in range(2))
    lens = torch.empty(k, num_seqs, dtype=torch.int32, device=on)
    tables = torch.empty(num_seqs, max_blocks, dtype=torch.int32, device=on)
    states = kept.hidden.new_empty(num_seqs, hidden)
    chain_start_kernel[(num_seqs,)](
        batch.seq_lens, batch.positions, batch.rows, batch.block_tables, kept.hidden, tables, positions, slots, lens, states,
        k, first_spare, max_blocks, batch.block_tables.stride(0), SPARE=num_spare, DEPTH=kept.hidden.shape[1], B=block_size,
        H=hidden, WIDTH=min(1024, triton.next_power_of_2(hidden)),
    )  # fmt: skip
    return tables, positions, slots, lens, states


def pair_up(
    combined: torch.Tensor, batch: ForwardBatch, kept: KeptStates, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `pairing.pair_up` does. `combined` is contiguous. A token whose own slot is -1 is padding."""
    (num_tokens, hidden), rows = combined.shape, batch.rows
    assert rows is not None
    paired = torch.empty_like(combined)
    positions, slots = (torch.empty(num_tokens, dtype=torch.int64, device=combined.device) for _ in range(2))
    given = combined, kept.hidden, kept.positions, batch.query_start_loc, rows, batch.positions, batch.slot_mapping
    width = min(1024, triton.next_power_of_2(hidden))
    sizes = {"DEPTH": kept.hidden.shape[1], "H": hidden, "WIDTH": width, "SEQS": 128}
    pair_up_kernel[(num_tokens,)](
        *given, batch.block_tables, paired, positions, slots, batch.num_seqs, batch.block_tables.stride(0), B=block_size,
        **sizes,
    )  # fmt: skip
    keep_kernel[(num_tokens,)](*given, batch.seq_lens, batch.num_seqs, **sizes)
    return paired, positions, slots
