"""The input of a model in a step. `worker/` builds it from the scheduler's output; the model knows no scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class ForwardBatch:
    """A ragged batch: the new tokens of all scheduled sequences, end to end, with no padding.

    Decodes, which have one new token, come first. A sequence after them may have one new token, too: the end of its prompt. `T` new tokens, `S` sequences.
    The batch is an argument down the model, for without a global context two engines can live in one process. M1's model reads
    `input_ids`, `positions` and `logits_indices` alone; each other field names the milestone that reads it first.
    """

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, in the sequence
    slot_mapping: torch.Tensor  # M2: [T] int64, where each new K/V goes (block * B + offset); -1: nowhere
    query_start_loc: torch.Tensor  # M4: [S+1] int32, prefix sums of num_new_tokens
    seq_lens: torch.Tensor  # M4: [S] int32, tokens in the cache after this step
    block_tables: torch.Tensor  # M2: [S, max_blocks] int32
    # [S] int64, the last new token of each sequence; X3, with drafts: the token before each of R samples, [R]
    logits_indices: torch.Tensor
    num_seqs: int  # M4
    num_decodes: int  # M4: sequences at the front with one new token
    max_query_len: int  # M4: upper bounds, so a captured graph can use them for any step
    max_seq_len: int  # M4
    query_lens_host: list[int]  # M2: for backends that loop over sequences
    seq_lens_host: list[int]  # M2
    is_disjoint: bool = False  # M6: whether no sequence reads K/V that another one writes in this step; False: unknown
    is_padded: bool = False  # M6: whether it is a captured step, padded to more and longer sequences
    has_drafts: bool = False  # X3: whether it is captured for sequences with drafts, which have few new tokens each
    rows: torch.Tensor | None = None  # X5: [S], each sequence's row, for layers that keep a state by row; else None
    only_last: bool = False  # M6: whether only the hidden states of last tokens are read; False: unknown
