"""A step as values: the scheduler sends down what to compute, the device sends up what it sampled. Neither refers to a `Sequence`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from folovllm.step.sampling_spec import Logprobs, SamplingSpec, TokenIds
from folovllm.step.token_bitmask import TokenBitmasks


class NothingScheduled(RuntimeError):
    """A step has no scheduled sequences although requests wait. The engine would step like this for ever."""

    def __init__(self) -> None:
        super().__init__("requests wait and nothing was scheduled: the scheduler or the cache lets none of them in")


class Scores(NamedTuple):
    """Tokens of a prompt whose log-probabilities a request wants and a scheduled sequence computes."""

    first: int  # index, in the scheduled sequence, of the token before the first of them
    token_ids: TokenIds  # [n] int32, a view
    num_top: int  # most likely tokens to report beside each


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step: its tokens `start` to `start + num_new_tokens`."""

    seq_id: int  # the sequence's number; no other sequence ever has it
    row: int  # the sequence's place among those that run; its own for as long as it runs
    start: int
    num_new_tokens: int
    token_ids: TokenIds  # [num_new_tokens] int32, a view; empty if the one token is on the device and not here yet
    new_blocks: tuple[int, ...]  # the end of its block table: the part that no scheduled sequence has brought yet
    first_new_block: int  # their place in the table: how many entries came before
    num_samples: int  # tokens to sample in this step; 0 in the middle of a prompt
    sampling: SamplingSpec | None  # with the first scheduled sequence of a row, whatever the row held before
    scores: Scores | None = None

    @property
    def end(self) -> int:
        """Tokens in the cache after the step, and the position of the token to sample."""
        return self.start + self.num_new_tokens

    def __repr__(self) -> str:
        return f"ScheduledSequence(seq {self.seq_id}, row {self.row}: tokens {self.start} to {self.end}, {self.num_samples} sampled)"


def tokens_to_score(scheduled_seqs: Sequence[ScheduledSequence]) -> list[tuple[int, int, int, int]]:
    """Four numbers for each prompt token to score: index of its sequence, token of the step before it, its id, `num_top`."""
    wanted, start = [], 0
    for i, scheduled in enumerate(scheduled_seqs):
        if (scores := scheduled.scores) is not None:
            ids = enumerate(scores.token_ids.tolist(), start + scores.first)
            wanted += [(i, after, token, scores.num_top) for after, token in ids]
        start += scheduled.num_new_tokens
    return wanted


@dataclass(slots=True, frozen=True)
class SchedulerOutput:
    """One step: scheduled sequences, decodes first."""

    scheduled_seqs: tuple[ScheduledSequence, ...] = ()
    preempted: tuple[int, ...] = ()  # sequences that lost their cache for it, by `seq_id`
    masks: TokenBitmasks | None = None  # of answers that must have a form, where they are known before the step starts

    @property
    def num_tokens(self) -> int:
        """T: tokens computed in this step."""
        return sum(scheduled.num_new_tokens for scheduled in self.scheduled_seqs)

    def __repr__(self) -> str:
        preempted = f", preempted {list(self.preempted)}" if self.preempted else ""
        return f"SchedulerOutput({list(self.scheduled_seqs)}{preempted})"


@dataclass(slots=True, frozen=True)
class StepResult:
    """What a step sampled, sequence by sequence: no token in the middle of a prompt, one elsewhere, several with drafts."""

    token_ids: list[list[int]]  # [S]
    # By index of the sequence, of those that asked: one entry a sampled token, behind those of `ScheduledSequence.scores`.
    logprobs: dict[int, list[Logprobs]]


def one_each(
    scheduled_seqs: tuple[ScheduledSequence, ...],
    token_ids: list[int],
    logprobs: list[Logprobs | None],
    scores: dict[int, list[Logprobs]] | None = None,
) -> StepResult:
    """The result of a step that sampled one token for every row [S]; tokens in the middle of a prompt are dropped.

    `scores`: by index of the scheduled sequence, what `ScheduledSequence.scores` asked for.
    """
    sampled = [
        [token] if scheduled.num_samples else [] for scheduled, token in zip(scheduled_seqs, token_ids, strict=True)
    ]
    asked = scores or {}
    for i, row in enumerate(logprobs):
        if row is not None and scheduled_seqs[i].num_samples:
            asked.setdefault(i, []).append(row)
    return StepResult(sampled, asked)
