"""The records of a step, down to the device and up again. None of them refers to a `Sequence`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from folovllm.step.scores import Scores

Int32 = npt.NDArray[np.int32]
TokenIds = Int32
NO_TOKENS: TokenIds = np.empty(0, np.int32)
# (token id, log-probability, rank): the sampled one first, then the most likely
Logprobs = list[tuple[int, float, int]]
# X1, X3, X5: what only some steps carry, by owner (masks, drafts, states): int32 [n, k]; its first column is an index of a scheduled sequence.
Extras = Mapping[str, Int32]


class NothingScheduled(RuntimeError):
    """A step has no scheduled sequences although requests wait: the engine would loop for ever."""

    def __init__(self) -> None:
        super().__init__("requests wait and nothing was scheduled: the scheduler or the cache lets none of them in")


@dataclass(slots=True, frozen=True, eq=False)
class SamplingSpec:
    """How to sample a sequence's tokens; the devices keep it. A token's position is its index in prompt and answer."""

    seed: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or less: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None  # how many of the most likely tokens to report
    first_end: int = 0  # from this position on a token of `forbidden` may be sampled (`min_tokens`)
    forbidden: tuple[int, ...] = ()  # tokens that end the answer: forbidden before `first_end`, allowed from there on
    num_prompt_tokens: int = 0
    history: TokenIds = field(default_factory=lambda: NO_TOKENS)  # tokens so far, if penalties or bad words need them
    allowed: tuple[int, ...] | None = None  # the only tokens that may be sampled; None: all
    has_grammar: bool = False  # each token has its own mask
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not occur in the answer
    bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit), each id once

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def has_words(self) -> bool:
        """Whether the request itself changes logits or forbids tokens: `adjusts_logits` without the grammar."""
        rules = self.forbidden, self.allowed is not None, self.bad_words, self.bias
        return self.has_penalties or any(map(bool, rules))

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits change or tokens are forbidden before temperature and filters."""
        return self.has_words or self.has_grammar


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step: its tokens `start` to `end`."""

    seq_id: int  # the sequence's number, unique for the whole life of the engine
    row: int  # the running sequence's place in the batch; it keeps its row until it stops running
    start: int
    end: int  # tokens in the cache after the step, and the position of the token to sample
    token_ids: TokenIds  # [num_new_tokens] int32, a view; empty if the one token is still on the device
    new_blocks: tuple[int, ...]  # M2: the end of its block table: the entries that no earlier step has sent
    first_new_block: int  # M2: index in the table of the first new block
    num_samples: int  # tokens to sample in this step; 0 in the middle of a prompt
    sampling: SamplingSpec | None  # in the sequence's first step in this row; then None
    scores: Scores | None = None  # prompt tokens to report log-probabilities of (`prompt_logprobs`); None: none

    @property
    def num_new_tokens(self) -> int:
        """Tokens that the step computes of it."""
        return self.end - self.start

    def __repr__(self) -> str:
        return f"ScheduledSequence(seq {self.seq_id}, row {self.row}: tokens {self.start} to {self.end}, {self.num_samples} sampled)"


@dataclass(slots=True, frozen=True)
class SchedulerOutput:
    """One step: scheduled sequences, decodes first."""

    scheduled_seqs: tuple[ScheduledSequence, ...] = ()
    preempted: tuple[int, ...] = ()  # `seq_id`s of sequences whose cache this step took
    extras: Extras | None = None  # most steps have none, and cost nothing more; M1's only with a grammar

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

    def wait(self) -> StepResult:
        """Return itself. An executor may return a step in flight, whose `wait` blocks; this result is there already."""
        return self


def one_each(
    scheduled_seqs: tuple[ScheduledSequence, ...],
    token_ids: list[int],
    logprobs: list[Logprobs | None],
    scores: dict[int, list[Logprobs]] | None = None,
) -> StepResult:
    """Make the result of a step from one token for each sequence [S]. A sequence in the middle of its prompt drops it. `scores`: by index."""
    sampled = [[token] if each.num_samples else [] for each, token in zip(scheduled_seqs, token_ids, strict=True)]
    logprobs_of = scores or {}
    for i, row in enumerate(logprobs):
        if row is not None and scheduled_seqs[i].num_samples:
            logprobs_of.setdefault(i, []).append(row)
    return StepResult(sampled, logprobs_of)
