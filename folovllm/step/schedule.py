"""A step as values: the scheduler sends down what to compute, the device sends up what it drew. It sees no `Sequence`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from folovllm.step.draw import DrawSpec, Logprobs, TokenIds
from folovllm.step.masks import Masks


class NothingScheduled(RuntimeError):
    """A step has no shares although requests wait. The engine would step like this for ever."""

    def __init__(self) -> None:
        super().__init__("requests wait and nothing was scheduled: the scheduler or the cache lets none of them in")


class Scores(NamedTuple):
    """Tokens of a prompt whose log-probabilities a request wants and a share computes."""

    first: int  # index, in the share, of the token before the first of them
    token_ids: TokenIds  # [n] int32, a view
    num_top: int  # most likely tokens to report beside each


class Share(NamedTuple):
    """One sequence's part of a step: its tokens `start` to `start + num_new_tokens`."""

    seq_id: int  # the sequence's number; no other sequence ever has it
    row: int  # the sequence's place among those that run; its own for as long as it runs
    start: int
    num_new_tokens: int
    token_ids: TokenIds  # [num_new_tokens] int32, a view; empty if the one token is on the device and not here yet
    new_blocks: tuple[int, ...]  # the end of its block table: the part that no share has brought yet
    first_new_block: int  # their place in the table: how many entries came before
    num_draws: int  # tokens to draw after it: 0 where it does not reach the last token
    draw: DrawSpec | None  # with the first share of a row, whatever the row held before
    scores: Scores | None = None

    @property
    def end(self) -> int:
        """Tokens in the cache after the step, and the position of the token to draw."""
        return self.start + self.num_new_tokens

    def __repr__(self) -> str:
        return f"Share(seq {self.seq_id}, row {self.row}: tokens {self.start} to {self.end}, {self.num_draws} drawn)"


def tokens_to_score(shares: Sequence[Share]) -> list[tuple[int, int, int, int]]:
    """Four numbers for each prompt token to score: index of its share, token of the step before it, its id, `num_top`."""
    wanted, start = [], 0
    for i, share in enumerate(shares):
        if (scores := share.scores) is not None:
            ids = enumerate(scores.token_ids.tolist(), start + scores.first)
            wanted += [(i, after, token, scores.num_top) for after, token in ids]
        start += share.num_new_tokens
    return wanted


@dataclass(slots=True, frozen=True)
class SchedulerOutput:
    """One step: shares, decodes first."""

    shares: tuple[Share, ...] = ()
    preempted: tuple[int, ...] = ()  # sequences that lost their cache for it, by `seq_id`
    masks: Masks | None = None  # of answers that must have a form, where they are known before the step starts

    @property
    def num_tokens(self) -> int:
        """T: tokens computed in this step."""
        return sum(share.num_new_tokens for share in self.shares)

    def __repr__(self) -> str:
        preempted = f", preempted {list(self.preempted)}" if self.preempted else ""
        return f"SchedulerOutput({list(self.shares)}{preempted})"


@dataclass(slots=True, frozen=True)
class StepResult:
    """What a step drew, share by share: no token where a share draws none, one today, several with speculation."""

    token_ids: list[list[int]]  # [S]
    logprobs: dict[int, list[Logprobs]]  # by index of the share, of those that asked: one entry for each token that
    # was drawn; before them those of `Share.scores`


def one_each(
    shares: tuple[Share, ...],
    token_ids: list[int],
    logprobs: list[Logprobs | None],
    scores: dict[int, list[Logprobs]] | None = None,
) -> StepResult:
    """The result of a draw that gave every row [S] one token: it counts where the share draws, and else is dropped.

    `scores`: by index of the share, what `Share.scores` asked for.
    """
    drawn = [[token] if share.num_draws else [] for share, token in zip(shares, token_ids, strict=True)]
    asked = scores or {}
    for i, row in enumerate(logprobs):
        if row is not None and shares[i].num_draws:
            asked.setdefault(i, []).append(row)
    return StepResult(drawn, asked)
