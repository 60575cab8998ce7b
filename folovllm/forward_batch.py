"""What a model is given in a step. `worker/` builds it from the scheduler's decisions; its readers need not know of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class ForwardBatch:
    """A ragged batch: the new tokens of all scheduled sequences, end to end, with no padding.

    Decodes, which have one new token, come first; among the others some may have just one, too. `T` new tokens, `S`
    sequences. Passed explicitly down the model: there is no global context, so two engines can live in one process.
    """

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, in the sequence
    slot_mapping: torch.Tensor  # [T] int64, where each new K/V goes (block * B + offset); -1: nowhere
    query_start_loc: torch.Tensor  # [S+1] int32, prefix sums of num_new_tokens
    seq_lens: torch.Tensor  # [S] int32, tokens in the cache after this step
    block_tables: torch.Tensor  # [S, max_blocks] int32
    logits_indices: torch.Tensor  # [S] int64, the last new token of each sequence; with guesses those of all draws, [R]
    num_seqs: int
    num_decodes: int  # how many sequences in front have one new token
    max_query_len: int  # upper bounds, so that a captured graph may keep them
    max_seq_len: int
    query_lens_host: list[int]  # for backends that loop over sequences
    seq_lens_host: list[int]
    is_disjoint: bool = False  # whether it is certain that no sequence reads K/V that another one writes in this step
    is_padded: bool = False  # whether it is a recorded step, with room for more and longer sequences than there are
    has_guesses: bool = False  # X3: whether it is recorded for sequences with guesses, which have few new tokens each
    only_last: bool = False  # whether it is certain that nobody reads hidden states but the last tokens'
