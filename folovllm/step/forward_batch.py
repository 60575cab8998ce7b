"""The input of a model in a step. `worker/` builds it from the scheduler's output; the model knows no scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class ForwardBatch:
    """A ragged batch: the new tokens of all scheduled sequences, end to end, with no padding.

    Decodes, which have one new token, come first. A sequence after them may have one new token, too. `T` new tokens, `S`
    sequences. The batch is passed down the model as an argument. There is no global context, so two engines can live in one process.
    """

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, in the sequence
    slot_mapping: torch.Tensor  # [T] int64, where each new K/V goes (block * B + offset); -1: nowhere
    query_start_loc: torch.Tensor  # [S+1] int32, prefix sums of num_new_tokens
    seq_lens: torch.Tensor  # [S] int32, tokens in the cache after this step
    block_tables: torch.Tensor  # [S, max_blocks] int32
    # [S] int64, the last new token of each sequence; with drafts the token before each sample, [R]
    logits_indices: torch.Tensor
    num_seqs: int
    num_decodes: int  # sequences at the front with one new token
    max_query_len: int  # upper bounds, so a captured graph can use them for any step
    max_seq_len: int
    query_lens_host: list[int]  # for backends that loop over sequences
    seq_lens_host: list[int]
    is_disjoint: bool = False  # whether no sequence reads K/V that another one writes in this step; False: unknown
    is_padded: bool = False  # whether it is a captured step, padded to more and longer sequences
    has_drafts: bool = False  # X3: whether it is captured for sequences with drafts, which have few new tokens each
    rows: torch.Tensor | None = None  # [S], each sequence's row, for layers that keep a state by row; None: nobody does
    only_last: bool = False  # whether only the hidden states of last tokens are read; False: unknown
