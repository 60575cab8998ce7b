"""What a device must know of a request to sample its tokens. It travels once, with the first scheduled sequence of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Logprobs = list[tuple[int, float, int]]  # (token id, log-probability, rank): the chosen first, then the most likely


def no_tokens() -> TokenIds:
    """[0]"""
    return np.empty(0, np.int32)


@dataclass(slots=True, frozen=True, eq=False)
class SamplingSpec:
    """How the tokens of one sequence are sampled.

    The position (the index of the token to sample in its sequence) is no part of it: `ScheduledSequence.end` is.
    """

    seed: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or less: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None  # how many of the most likely tokens to report
    first_end: int = 0  # the first position at which a token of `forbidden` may be sampled (`min_tokens`)
    forbidden: tuple[int, ...] = ()  # tokens that would end the answer
    num_prompt_tokens: int = 0
    history: TokenIds = field(default_factory=no_tokens)  # the tokens so far, for penalties and bad words; else empty
    allowed: tuple[int, ...] | None = None  # the tokens that may be sampled at all; None: all
    has_grammar: bool = False  # a new mask comes for each token
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of tokens that the answer must not hold
    bias: tuple[tuple[int, float], ...] = ()  # token ids, each once, and what is added to their logits

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were seen count for less."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def has_mask(self) -> bool:
        """Whether a bit for each token says which may be sampled."""
        return self.has_grammar or self.allowed is not None

    @property
    def has_rules(self) -> bool:
        """Whether the request itself forbids tokens or makes them likelier."""
        return self.has_mask or bool(self.bad_words) or bool(self.bias)

    @property
    def has_line(self) -> bool:
        """Whether sampling depends on more than these numbers and the logits: on tokens so far, masks, or biases."""
        return self.has_penalties or self.has_rules or bool(self.forbidden)

    @property
    def answer(self) -> TokenIds:
        """The part of the history behind the prompt."""
        return self.history[self.num_prompt_tokens :]

    @property
    def has_filters(self) -> bool:
        """Whether a token may be too unlikely to be sampled."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def about_to_end(bad_words: Sequence[Sequence[int]], answer: Sequence[int] | TokenIds) -> list[int]:
    """The last tokens of those `bad_words` of which `answer` ends with all the others: what must not come next."""
    last = [int(token) for token in answer[-max(map(len, bad_words), default=1) :]]
    return [word[-1] for word in bad_words if last[len(last) - len(word) + 1 :] == [*word[:-1]]]
