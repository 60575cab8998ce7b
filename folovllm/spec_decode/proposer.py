"""Who proposes the next tokens of a sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from folovllm.step.sampling_spec import SamplingSpec, TokenIds


class RowState(NamedTuple):
    """A running sequence, as a proposer sees it."""

    seq_id: int  # no other sequence ever has it
    token_ids: TokenIds  # [n] int32: prompt and answer as far as known, a view. The first draft token is for position n
    num_prompt_tokens: int
    sampling: (
        SamplingSpec  # how its tokens are sampled; with the seed and a position a draft samples with the same noise
    )
    cache_salt: str | None = None  # what is learnt from a sequence may serve those of the same salt


class Proposer(ABC):
    """Drafts tokens. A rejected draft costs time and never changes a text.

    The engine calls, for each sequence: `admit` once, before its first draft; then `propose_all` and `observe`, in turn or
    not; `finish` once, however it ended. While nobody is asked for drafts, what was sampled is told late, many tokens at once.
    A sequence that gives way to others is still the same when it comes back: a proposer that holds memory for it may drop
    that at any time, since a `RowState` has all tokens.

    All but `propose` have a body that will do for a proposer without state.
    """

    @abstractmethod
    def propose(self, state: RowState, k: int) -> Sequence[int]:
        """Return at most `k` tokens, k >= 1, that may come next in `state`, in their order. Empty: no draft."""

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """`propose` for each of several sequences; an empty list where its k is 0. A draft model runs them together."""
        return [list(self.propose(state, k)) if k else [] for state, k in zip(states, ks, strict=True)]

    def resolve(self, draft: Sequence[int]) -> list[int]:
        """Replace the placeholder ids in a draft of the last `propose_all` (`DraftTokens`). Waits for their tokens."""
        return list(draft)

    def admit(self, state: RowState) -> None:
        """A sequence came; its prompt is computed."""

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """These tokens were sampled, one or several, whether they were drafted or not."""

    def finish(self, seq_id: int) -> None:
        """A sequence that was admitted has ended; what is kept for it alone can go."""

    def remember(self, answer: TokenIds, cache_salt: str | None) -> None:
        """The answer of a sequence that ended by itself and was never admitted: nobody was asked about it."""

    def close(self) -> None:
        """The engine was closed: what is on a device can go. Nothing is asked any more."""


class CompositeProposer(Proposer):
    """Asks one proposer after the other, until each sequence has a draft."""

    def __init__(self, proposers: Sequence[Proposer], vocab_size: int | None = None) -> None:
        """`vocab_size`: a draft ends before what is no token of the vocabulary. None: placeholder ids are behind it."""
        self._proposers, self._vocab_size = proposers, vocab_size

    def propose(self, state: RowState, k: int) -> list[int]:
        """Return the first draft that there is."""
        return self.propose_all([state], [k])[0]

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """Ask each proposer about the sequences that have no draft yet."""
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
        """Replace the placeholder ids of each proposer."""
        for proposer in self._proposers:
            draft = proposer.resolve(draft)
        return list(draft)

    def admit(self, state: RowState) -> None:
        """Tell all proposers."""
        for proposer in self._proposers:
            proposer.admit(state)

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Tell all proposers."""
        for proposer in self._proposers:
            proposer.observe(seq_id, token_ids)

    def finish(self, seq_id: int) -> None:
        """Tell all proposers."""
        for proposer in self._proposers:
            proposer.finish(seq_id)

    def remember(self, answer: TokenIds, cache_salt: str | None) -> None:
        """Tell all proposers."""
        for proposer in self._proposers:
            proposer.remember(answer, cache_salt)

    def close(self) -> None:
        """Close all proposers."""
        for proposer in self._proposers:
            proposer.close()
