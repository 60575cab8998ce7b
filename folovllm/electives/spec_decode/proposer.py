"""The hook for what proposes the next tokens of a sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from folovllm.step.schedule import SamplingSpec, TokenIds

if TYPE_CHECKING:
    from folovllm.executor.abstract import Executor


class RowState(NamedTuple):
    """A running sequence, as a proposer sees it."""

    seq_id: int  # no other sequence ever has it
    token_ids: TokenIds  # [n] int32: prompt and answer as far as known, a view. The first draft token is for position n
    num_prompt_tokens: int
    sampling: SamplingSpec  # with its seed and a position a draft model samples with the same noise
    cache_salt: str | None = None  # what is learnt from a sequence may serve only those of the same salt
    num_in_flight: int = 0  # 1 if one more token is sampled and not known; then the draft begins with that one


class Proposer(ABC):
    """Proposes draft tokens. A rejected draft token costs time and never changes a text.

    The engine calls `propose_all` with each sequence that shall get a draft, and `finish` once if it was ever asked about. A preempted
    sequence keeps its seq_id. A proposer may drop what it holds for a sequence at any time, since a `RowState` has all tokens.

    A proposer without state needs `propose` alone.
    """

    @abstractmethod
    def propose(self, state: RowState, k: int) -> Sequence[int]:
        """Return at most `k` tokens, k >= 1, that may come next in `state`, in their order. Empty: no draft."""

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """Return a draft for each of several sequences; an empty one where its k is 0. A draft model runs them together."""
        return [list(self.propose(state, k)) if k else [] for state, k in zip(states, ks, strict=True)]

    def resolve(self, draft: Sequence[int]) -> list[int]:
        """Replace the placeholder ids in a draft of the last `propose_all` (`DraftTokens`). Waits for their tokens."""
        return list(draft)

    def finish(self, seq_id: int) -> None:
        """Drop what is kept for a sequence that has ended, however it ended."""

    def remember(self, answer: TokenIds, cache_salt: str | None) -> None:
        """Note the answer of a sequence that ended by itself, whether or not a draft was ever asked for."""

    def bind(self, executor: Executor, row_of: Callable[[int], int]) -> None:
        """Note the executor of the model that verifies, and what gives a running sequence's row, by its seq_id."""

    def close(self) -> None:
        """Release what is on a device: the engine was closed."""


class CompositeProposer(Proposer):
    """Asks one proposer after the other, until each sequence has a draft. What it notes goes to all of them."""

    def __init__(self, proposers: Sequence[Proposer], vocab_size: int | None = None) -> None:
        """`vocab_size`: a draft ends before an id outside the vocabulary. None: a draft may have placeholder ids, which are outside."""
        self._proposers, self._vocab_size = proposers, vocab_size

    def propose(self, state: RowState, k: int) -> list[int]:
        return self.propose_all([state], [k])[0]

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in states]
        for proposer in self._proposers:
            left = [0 if draft else k for draft, k in zip(found, ks, strict=True)]
            if any(left):
                more = proposer.propose_all(states, left)
                found = [draft or list(other) for draft, other in zip(found, more, strict=True)]
        return found if self._vocab_size is None else [self._known_tokens(draft) for draft in found]

    def _known_tokens(self, draft: list[int]) -> list[int]:
        assert self._vocab_size is not None
        return list(takewhile(range(self._vocab_size).__contains__, draft))

    def resolve(self, draft: Sequence[int]) -> list[int]:
        for proposer in self._proposers:
            draft = proposer.resolve(draft)
        return list(draft)

    def finish(self, seq_id: int) -> None:
        for proposer in self._proposers:
            proposer.finish(seq_id)

    def remember(self, answer: TokenIds, cache_salt: str | None) -> None:
        for proposer in self._proposers:
            proposer.remember(answer, cache_salt)

    def bind(self, executor: Executor, row_of: Callable[[int], int]) -> None:
        for proposer in self._proposers:
            proposer.bind(executor, row_of)

    def close(self) -> None:
        for proposer in self._proposers:
            proposer.close()
