"""Guesses that nobody checks: while speculation is off, they are compared with what is drawn anyway."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from folovllm.spec.proposer import Depth, Proposer, RowState
from folovllm.step.draw import TokenIds


class Text:
    """The tokens of a sequence, and the guess at the next ones that has not been judged yet."""

    def __init__(self, state: RowState) -> None:
        self._state = state
        self._ids: TokenIds = np.array(state.token_ids)
        self._length = len(state.token_ids)
        self.guess: list[int] = []
        self.right = 0  # guesses that were drawn already, from the first on

    @property
    def state(self) -> RowState:
        """The sequence as it is now."""
        return self._state._replace(token_ids=self._ids[: self._length])

    def extend(self, token_ids: Sequence[int]) -> None:
        """These tokens were drawn. Amortised O(1) for a token."""
        end = self._length + len(token_ids)
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(end, np.int32)])
        self._ids[self._length : end] = token_ids
        self._length = end

    def is_judged(self, token_ids: Sequence[int]) -> bool:
        """Whether it is known, now that these tokens were drawn, how much of the guess was right."""
        for token in token_ids:
            if self.right == len(self.guess) or self.guess[self.right] != token:
                return True
            self.right += 1
        return self.right == len(self.guess)


class Shadow(Proposer):
    """A proposer whose guesses are scored also for sequences that no guess is asked for.

    It watches a few sequences only, so that what it costs does not grow with the batch; `Depth` takes them for a sample.
    """

    def __init__(
        self, inner: Proposer, depth: Depth, k: int = 4, most: int = 8, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`k`: tokens of a guess. `most`: sequences that are watched at a time, those that came first; 0 for a dear proposer."""
        self._inner, self._depth, self._k, self._most, self._clock = inner, depth, k, most, clock
        self._watched: dict[int, Text] = {}
        self._checked: set[int] = set()  # whose next tokens the model judges

    def admit(self, state: RowState) -> None:
        """As `Proposer`."""
        self._inner.admit(state)
        if len(self._watched) < self._most:
            self._watched[state.seq_id] = Text(state)

    def propose(self, state: RowState, k: int) -> Sequence[int]:
        """As `Proposer`."""
        return self.propose_all([state], [k])[0]

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """As `Proposer`; says how long it took, and for which sequences there is no idea."""
        start = self._clock()
        found = self._inner.propose_all(states, ks)
        if deepest := max(ks, default=0):
            self._depth.observe_guessing(deepest, self._clock() - start)
        for state, k, guess in zip(states, ks, found, strict=True):
            if k:
                self._checked.add(state.seq_id)
                if not guess:
                    self._depth.observe(state.seq_id, 0, 0)
        return found

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """As `Proposer`; judges a guess of its own, and makes the next one."""
        self._inner.observe(seq_id, token_ids)
        text = self._watched.get(seq_id)
        if text is None:
            return
        text.extend(token_ids)
        if seq_id in self._checked:
            self._checked.remove(seq_id)
            text.guess, text.right = [], 0
        elif text.is_judged(token_ids):
            self._depth.observe(seq_id, len(text.guess), text.right)
            text.guess, text.right = list(self._inner.propose(text.state, self._k)), 0

    def finish(self, seq_id: int) -> None:
        """As `Proposer`."""
        self._inner.finish(seq_id)
        self._watched.pop(seq_id, None)
        self._checked.discard(seq_id)
