"""The padded shapes for which steps are captured, and how a step is laid out in one.

A model launches hundreds of kernels a step. A step of few tokens is over before Python has launched them all, and with a
prompt in it all decodes wait. So not only decodes are captured but also small steps with prompts, and with drafts: in a shape
that has room for so many tokens and sequences, of which a step fills a part.

Tokens stay end to end; what is left behind them is padding. Among the sequences, those that are no decodes begin at a fixed
place, for decodes and prompts go to different kernels. A step of two decodes and a prompt of 5 tokens, with room for 12
tokens, 4 decodes and 3 others (lines of `Field` and one of `Sample`):

    ROW        4 7 - -  2 - -      - is the row behind all rows
    SEQ_LEN    9 3 0 0  5 0 0      of a sequence of length 0 nothing is read and nothing written
    QUERY_LEN  1 1 0 0  5 0 5      the last sequence, always padding, gets the tokens that nobody needs
    AFTER      0 1 6 0  0 0 0      samples stay side by side, as in the step
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from folovllm.setup import EngineSetup
from folovllm.step.packed import (
    NO_SAMPLES,
    Field,
    Int32,
    PackedStep,
    Parts,
    Sample,
    StepPacker,
    num_numbers,
    split,
)

TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072)  # beyond, computing takes longer than launching
DECODES = (0, 16, 64)  # and as many as there can be
DRAFT_TOKENS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class Bucket(NamedTuple):
    """A padded shape. Sequences that are no decodes have one column more than there can be, for padding."""

    num_tokens: int
    num_decodes: int  # columns for sequences with one new token
    num_others: int = 0
    num_samples: int = 0
    num_updates: int = 0  # new entries of block tables; where there are none, they are entered before the step

    @property
    def is_decode(self) -> bool:
        """Whether it is for steps of decodes alone: a matrix and nothing else."""
        return not self.num_others

    @property
    def has_drafts(self) -> bool:
        """Whether it is for steps with drafts, which it serves from their new blocks to their samples."""
        return self.num_updates > 0

    @property
    def num_seqs(self) -> int:
        """Columns of the first matrix."""
        return self.num_decodes + self.num_others

    @property
    def columns(self) -> Parts[int]:
        """How many columns each part of its buffer has."""
        num_tokens = 0 if self.is_decode else self.num_tokens
        return Parts(self.num_seqs, num_tokens, self.num_samples, self.num_updates, 0, 0, 0)

    def holds(self, step: PackedStep) -> bool:
        """Whether a step fits that is no decode, and that has drafts where the bucket is for these."""
        if len(step.tokens) > self.num_tokens:
            return False
        if self.has_drafts:  # then each token may be a sequence
            return step.updates.shape[1] <= self.num_updates
        return step.num_decodes <= self.num_decodes and step.num_seqs - step.num_decodes < self.num_others


def decode_bucket(width: int) -> Bucket:
    """For steps of up to `width` decodes."""
    return Bucket(width, width)


def prompt_bucket(num_tokens: int, num_decodes: int) -> Bucket:
    """For steps with prompts."""
    num_others = max(8, num_tokens // 32) + 1
    return Bucket(num_tokens, num_decodes, num_others, num_decodes + num_others)


def draft_bucket(num_tokens: int) -> Bucket:
    """For steps with drafts: as many sequences as tokens, or fewer, of which any number is sampled."""
    return Bucket(num_tokens, 0, num_tokens + 1, num_tokens, num_tokens)


def prompt_buckets(max_num_seqs: int, budget: int) -> list[Bucket]:
    """For steps with prompts of up to `budget` tokens, small ones first."""
    tokens = [n for n in TOKENS if n < budget] + [budget] * (budget <= TOKENS[-1])
    decodes = [n for n in DECODES if n < max_num_seqs] + [max_num_seqs]
    return [prompt_bucket(t, d) for t in tokens for d in decodes if d <= t]


def draft_buckets(num_samples: int) -> list[Bucket]:
    """For steps with drafts of up to `num_samples` samples, small ones first."""
    last = min(num_samples, DRAFT_TOKENS[-1])
    return [draft_bucket(n) for n in (*[n for n in DRAFT_TOKENS if n < last], last)]


def buckets_for(setup: EngineSetup, num_drafted: int) -> list[Bucket]:
    """What to capture on a device beside decodes; nothing on a CPU, where launching is not what takes the time."""
    return every_bucket(setup, num_drafted) if setup.device.type == "cuda" else []


def every_bucket(setup: EngineSetup, num_drafted: int) -> list[Bucket]:
    """All buckets but those of decodes. `num_drafted`: the most samples of a step with drafts; 0 if there are never any."""
    prompts = prompt_buckets(setup.max_num_seqs, setup.max_num_batched_tokens)
    return prompts + (draft_buckets(num_drafted) if num_drafted else [])


def pad(step: PackedStep, bucket: Bucket, padding_row: int) -> Int32:
    """Lay a step out in a bucket that holds it: its buffer, with padding in the rows behind all others."""
    numbers = np.zeros(num_numbers(bucket.columns), np.int32)
    parts, d = split(numbers, bucket.columns), min(step.num_decodes, bucket.num_decodes)
    parts.fields[Field.ROW] = padding_row
    parts.fields[:, :d] = step.fields[:, :d]
    parts.fields[:, bucket.num_decodes : bucket.num_decodes + step.num_seqs - d] = step.fields[:, d:]
    parts.fields[Field.QUERY_LEN, -1] = bucket.num_tokens - len(step.tokens)
    parts.tokens[: len(step.tokens)] = step.tokens
    parts.samples[Sample.ROW] = padding_row
    parts.samples[:, : step.num_samples] = step.samples
    if bucket.num_updates:
        parts.updates[0] = padding_row
        parts.updates[:, : step.updates.shape[1]] = step.updates
    return numbers


def padding_of(bucket: Bucket, padding_row: int) -> Int32:
    """The buffer of a step that is nothing but padding."""
    if bucket.is_decode:
        return StepPacker(padding_row, []).pack_decode([], bucket.num_decodes).fields.ravel()
    nobody = PackedStep(
        np.empty((len(Field), 0), np.int32), 0, 0, np.empty(0, np.int32), np.empty((3, 0), np.int32), NO_SAMPLES
    )
    return pad(nobody, bucket, padding_row)
