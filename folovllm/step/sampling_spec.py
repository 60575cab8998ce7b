"""What a device must know about a request to sample its tokens. It is sent once, in the sequence's first step in a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
# (token id, log-probability, rank): the sampled one first, then the most likely
Logprobs = list[tuple[int, float, int]]


def no_tokens() -> TokenIds:
    """Return an empty array."""
    return np.empty(0, np.int32)


@dataclass(slots=True, frozen=True, eq=False)
class SamplingSpec:
    """How to sample the tokens of one sequence.

    It does not hold the position of the token to sample. `ScheduledSequence.end` does.
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
    history: TokenIds = field(default_factory=no_tokens)  # tokens so far, if penalties or bad words need them
    allowed: tuple[int, ...] | None = None  # the only tokens that may be sampled; None: all
    has_grammar: bool = False  # each token has its own mask
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not occur in the answer
    bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit), each id once

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is sampled."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def has_words(self) -> bool:
        """Whether the request forbids tokens or changes their logits, other than by a grammar."""
        rules = self.forbidden, self.allowed is not None, self.bad_words, self.bias
        return self.has_penalties or any(map(bool, rules))

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits change or tokens are forbidden before temperature and filters. Only then `SamplerState.adjust` is needed."""
        return self.has_words or self.has_grammar

    @property
    def answer(self) -> TokenIds:
        """The part of the history after the prompt."""
        return self.history[self.num_prompt_tokens :]

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p applies."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def about_to_end(bad_words: Sequence[Sequence[int]], answer: Sequence[int] | TokenIds) -> list[int]:
    """Return the tokens that must not come next: the last token of each bad word whose other tokens end `answer`."""
    last = [int(token) for token in answer[-max(map(len, bad_words), default=1) :]]
    return [word[-1] for word in bad_words if last[len(last) - len(word) + 1 :] == [*word[:-1]]]
