"""The padded shapes (buckets) for which steps are captured, and the layout of a step in a bucket.

A model launches hundreds of kernels a step. The GPU computes a step of few tokens faster than Python launches its kernels, and
if such a step has a prompt, all decodes wait. So small steps with prompts or drafts are captured as well as decodes. A bucket
has a fixed number of tokens and sequences, and a step fills a part of it.

Tokens stay end to end, and padding follows them. Sequences that are no decodes begin at a fixed column, because decodes and
prompts go to different kernels. Here a step of two decodes and a prompt of 5 tokens is in a bucket of 12 tokens, 4 decodes and
3 others (lines of `Field` and one of `Sample`):

    ROW        4 7 - -  2 - -      - is the padding row
    SEQ_LEN    9 3 0 0  5 0 0      0: no K/V of the sequence is read or written
    QUERY_LEN  1 1 0 0  5 0 5      the last sequence is always padding, and gets the tokens of the padding
    AFTER      0 1 6 0  0 0 0      samples stay side by side, as in the step
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from folovllm.engine.setup import EngineSetup
from folovllm.step.packed import LINES, Field, PackedStep, Parts, Sample, StepPacker, split
from folovllm.step.schedule import Int32

TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072)  # larger steps are bound by the GPU
DECODES = (0, 16, 64)  # and `max_num_seqs`


class Bucket(NamedTuple):
    """A padded shape. It has one column more than its most sequences that are no decodes, for padding."""

    num_tokens: int
    num_decodes: int  # columns for sequences with one new token
    num_others: int = 0
    num_samples: int = 0
    num_updates: int = 0  # new entries of block tables; with 0 they are entered before the replay

    @property
    def is_decode(self) -> bool:
        """Whether the bucket is for decode steps, whose buffer is the first matrix alone."""
        return not self.num_others

    @property
    def has_drafts(self) -> bool:
        """Whether the bucket is for steps with drafts. Its graph enters new blocks, computes and samples."""
        return self.num_updates > 0

    @property
    def num_seqs(self) -> int:
        """The number of columns of the first matrix."""
        return self.num_decodes + self.num_others

    @property
    def columns(self) -> Parts[int]:
        """The number of columns of each part of the bucket's buffer."""
        num_tokens = 0 if self.is_decode else self.num_tokens
        return Parts(self.num_seqs, num_tokens, self.num_samples, self.num_updates, 0, 0, 0, 0)

    def holds(self, step: PackedStep) -> bool:
        """Return whether a step fits. The step is no decode step, and has drafts if the bucket is for drafts."""
        if len(step.tokens) > self.num_tokens:
            return False
        if self.has_drafts:  # then each token may be a sequence
            return step.updates.shape[1] <= self.num_updates
        return step.num_decodes <= self.num_decodes and step.num_seqs - step.num_decodes < self.num_others


def decode_bucket(width: int) -> Bucket:
    """Return the bucket for steps of up to `width` decodes."""
    return Bucket(width, width)


def prompt_bucket(num_tokens: int, num_decodes: int) -> Bucket:
    """Make the bucket of just these sizes for steps with prompts. Beside decodes it has columns for one prompt in 32 tokens (at least 8), and one for padding."""
    num_others = max(8, num_tokens // 32) + 1
    return Bucket(num_tokens, num_decodes, num_others, num_decodes + num_others)


def prompt_buckets(max_num_seqs: int, budget: int) -> list[Bucket]:
    """Return the buckets for steps with prompts of up to `budget` tokens, small ones first."""
    tokens = [n for n in TOKENS if n < budget] + [budget] * (budget <= TOKENS[-1])
    decodes = [n for n in DECODES if n < max_num_seqs] + [max_num_seqs]
    return [prompt_bucket(t, d) for t in tokens for d in decodes if d <= t]


def buckets_for(setup: EngineSetup, more: list[Bucket]) -> list[Bucket]:
    """Return the buckets to capture beside those of decodes: for steps with prompts, and `more`. None on a CPU, where launches cost little."""
    if setup.device.type != "cuda":
        return []
    return prompt_buckets(setup.max_num_seqs, setup.max_num_batched_tokens) + more


def pad(step: PackedStep, bucket: Bucket, padding_row: int) -> Int32:
    """Return the buffer of a step in a bucket that holds it. Padding has the row `padding_row`."""
    numbers = np.zeros(sum(lines * width for lines, width in zip(LINES, bucket.columns, strict=True)), np.int32)
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
    """Return the buffer of a step that consists of padding alone."""
    if bucket.is_decode:
        return StepPacker(padding_row, []).pack_decode([], bucket.num_decodes).fields.ravel()
    nobody = PackedStep(np.empty((len(Field), 0), np.int32), 0, 0, np.empty(0, np.int32), np.empty((3, 0), np.int32))
    return pad(nobody, bucket, padding_row)
