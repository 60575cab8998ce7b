"""The records of a step: the scheduler sends what to compute, and the device returns what it sampled.

Neither refers to a `Sequence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from folovllm.step.sampling_spec import Logprobs, SamplingSpec, TokenIds
from folovllm.step.token_bitmask import TokenBitmasks

NO_SNAPSHOT = -1  # in the place of a number of a snapshot


class NothingScheduled(RuntimeError):
    """A step has no scheduled sequences although requests wait. Without this error the engine would loop for ever."""

    def __init__(self) -> None:
        super().__init__("requests wait and nothing was scheduled: the scheduler or the cache lets none of them in")


class Scores(NamedTuple):
    """Prompt tokens whose log-probabilities the request wants and this step computes."""

    first: int  # index in the sequence's new tokens of the token before the first of `token_ids`
    token_ids: TokenIds  # [n] int32, a view
    num_top: int  # most likely tokens to report beside each


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step: its tokens `start` to `start + num_new_tokens`."""

    seq_id: int  # the sequence's number, unique for the whole life of the engine
    row: int  # the running sequence's place in the batch; it keeps its row until it stops running
    start: int
    num_new_tokens: int
    token_ids: TokenIds  # [num_new_tokens] int32, a view; empty if the one token is still on the device
    new_blocks: tuple[int, ...]  # the end of its block table: the entries that no earlier step has sent
    first_new_block: int  # index in the table of the first new block
    num_samples: int  # tokens to sample in this step; 0 in the middle of a prompt
    sampling: SamplingSpec | None  # in the sequence's first step in this row
    scores: Scores | None = None
    load_state: int = NO_SNAPSHOT  # the snapshot with which the row's state begins, in the first step in this row
    save_state: int = NO_SNAPSHOT  # the snapshot that becomes a copy of the row's state after the step

    @property
    def end(self) -> int:
        """Tokens in the cache after the step, and the position of the token to sample."""
        return self.start + self.num_new_tokens

    def __repr__(self) -> str:
        return f"ScheduledSequence(seq {self.seq_id}, row {self.row}: tokens {self.start} to {self.end}, {self.num_samples} sampled)"


def tokens_to_score(scheduled_seqs: Sequence[ScheduledSequence]) -> list[tuple[int, int, int, int]]:
    """Return four numbers for each prompt token to score: sequence index, index in the step of the token before it, id, `num_top`."""
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
    preempted: tuple[int, ...] = ()  # `seq_id`s of sequences whose cache this step took
    masks: TokenBitmasks | None = None  # of requests with a grammar, if they are known before the step starts

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens that this step computes."""
        return sum(scheduled.num_new_tokens for scheduled in self.scheduled_seqs)

    def __repr__(self) -> str:
        preempted = f", preempted {list(self.preempted)}" if self.preempted else ""
        return f"SchedulerOutput({list(self.scheduled_seqs)}{preempted})"


@dataclass(slots=True, frozen=True)
class StepResult:
    """The sampled tokens of each sequence: none in the middle of a prompt, else one, or several with drafts."""

    token_ids: list[list[int]]  # [S]
    # By sequence index, for requests that want them: the entries of `ScheduledSequence.scores`, then one a sampled token.
    logprobs: dict[int, list[Logprobs]]


def one_each(
    scheduled_seqs: tuple[ScheduledSequence, ...],
    token_ids: list[int],
    logprobs: list[Logprobs | None],
    scores: dict[int, list[Logprobs]] | None = None,
) -> StepResult:
    """Return the result of a step that sampled one token for every row [S]. Tokens in the middle of a prompt are dropped.

    `scores`: the log-probabilities for `ScheduledSequence.scores`, by index of the scheduled sequence.
    """
    sampled = [
        [token] if scheduled.num_samples else [] for scheduled, token in zip(scheduled_seqs, token_ids, strict=True)
    ]
    asked = scores or {}
    for i, row in enumerate(logprobs):
        if row is not None and scheduled_seqs[i].num_samples:
            asked.setdefault(i, []).append(row)
    return StepResult(sampled, asked)
