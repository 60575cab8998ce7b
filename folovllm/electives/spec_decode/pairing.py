"""What a draft head reads in a step, and what a chain begins with, in torch. On a GPU `kernels.pairs` has the same functions."""

from __future__ import annotations

import torch

from folovllm.electives.spec_decode.heads import KeptStates, chain_places, head_inputs
from folovllm.step.forward_batch import ForwardBatch


def pair_up(
    combined: torch.Tensor, batch: ForwardBatch, kept: KeptStates, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states [T, H], positions and slots [T] of the pairs of a step's tokens, and keep the step's last states.

    The slot is -1 where there is no pair: for padding, and for a token whose state before is not there.

    Args:
        combined: [T, H], the step's hidden states as `DraftHead.combine` returns them.
    """
    assert batch.rows is not None
    ends, rows, sequence = batch.seq_lens.long(), batch.rows.long(), sequences_of(batch)
    starts = ends - batch.query_start_loc.diff()
    before, is_there = kept.before(rows, starts)
    positions, hidden = head_inputs(batch.positions, combined, sequence, before)
    first = torch.where(is_there, starts - 1, starts)  # the first position with a pair
    is_pair = (batch.slot_mapping >= 0) & (positions >= first[sequence])
    positions = positions.clamp(min=0)
    slots = batch.block_tables[sequence, positions // block_size].long() * block_size + positions % block_size
    kept.keep(rows[sequence], batch.positions, ends[sequence], combined)
    return hidden, positions, torch.where(is_pair, slots, -1)


def start_chain(
    batch: ForwardBatch, k: int, kept: KeptStates, block_size: int, first_spare: int, num_spare: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return all inputs of a chain of `k` drafts but its tokens, for a batch whose newest tokens are not computed.

    These are block tables [S, max_blocks] int32; positions and slots [k, S] int64 and lengths [k, S] int32 of the pairs; and the
    hidden states [S, H] of the first pairs. A sequence may have no block yet for the pairs of its drafts. So its table goes on
    with the spare blocks of its row: `num_spare` for each row, from block `first_spare` on.
    """
    assert batch.rows is not None
    rows, tables = batch.rows.long(), batch.block_tables
    newest = torch.where(batch.seq_lens > 0, batch.positions, -1)
    behind = torch.arange(tables.shape[1], device=tables.device) - (newest + block_size - 1)[:, None] // block_size
    spare = first_spare + rows[:, None] * num_spare + behind.clamp(0, num_spare - 1)
    tables = torch.where(behind < 0, tables, spare.int())
    positions, slots = chain_places(newest, tables, block_size, k)
    lens = torch.where(newest < 0, 0, positions + 1).int()
    return tables, positions.contiguous(), slots.contiguous(), lens, kept.before(rows, newest)[0]


def sequences_of(batch: ForwardBatch) -> torch.Tensor:
    """Return the sequence of each token of a batch, [T] int64. Device work only."""
    count = torch.arange(len(batch.input_ids), device=batch.positions.device)
    if batch.num_decodes == batch.num_seqs:
        return count
    return torch.searchsorted(batch.query_start_loc[1:].long(), count, right=True).clamp(max=batch.num_seqs - 1)
