"""Guesses that nobody checks: for sequences that get none, they are compared with what was drawn anyway."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from folovllm.spec.proposer import Depth, Proposer, RowState


class Shadow(Proposer):
    """A proposer whose guesses are scored also for sequences that no guess is asked for.

    It looks back at texts that have grown meanwhile, at a few of them and now and then, so that looking takes no more than
    `SHARE` of the time, however large the batch is; `Depth` takes them for a sample.
    """

    SHARE = 0.005  # of the time, for looks
    LONGEST = 0.0005  # seconds after which no further sequence is looked at: a step waits
    REACH, STRIDE = 24, 4  # tokens: how far a look goes back, and from one guess that says nothing to the next

    def __init__(
        self, inner: Proposer, depth: Depth, k: int = 4, most: int = 4, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`k`: tokens of a guess. `most`: sequences that are looked at in turn; 0 for a dear proposer."""
        self._inner, self._depth, self._k, self._most, self._clock = inner, depth, k, most, clock
        self._judged: dict[int, int] = {}  # tokens of each sequence that a guess was compared with, by seq_id
        self._next_look = 0.0

    def admit(self, state: RowState) -> None:
        """As `Proposer`."""
        self._inner.admit(state)

    def propose(self, state: RowState, k: int) -> Sequence[int]:
        """As `Proposer`."""
        return self.propose_all([state], [k])[0]

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """As `Proposer`; says how long it took."""
        start = self._clock()
        found = self._inner.propose_all(states, ks)
        if deepest := max(ks, default=0):
            grown = (len(s.token_ids) - self._judged.get(s.seq_id, 0) for s, k in zip(states, ks, strict=True) if k)
            self._depth.observe_guessing(deepest if max(grown) <= deepest else 0, self._clock() - start)
        for state, k in zip(states, ks, strict=True):
            if k:
                self._judged[state.seq_id] = len(state.token_ids) + 1  # those are judged by the model
        return found

    def tokens_of(self, guess: Sequence[int]) -> list[int]:
        """As `Proposer`."""
        return self._inner.tokens_of(guess)

    def num_looks(self) -> int:
        """As `Proposer`: none until the last looks are paid for."""
        return self._most if self._most and self._clock() >= self._next_look else 0

    def look(self, states: Sequence[RowState]) -> None:
        """As `Proposer`."""
        start = end = self._clock()
        for state in states:
            if end - start > self.LONGEST:
                break
            self._score(state)
            end = self._clock()
        self._next_look = end + (end - start) / self.SHARE

    def _score(self, state: RowState) -> None:
        """Guess as if the end of the text were not known, from some places on, and compare."""
        tokens, n = state.token_ids, len(state.token_ids)
        at = max(self._judged.get(state.seq_id, state.num_prompt_tokens), n - self.REACH)
        while at < n:
            guess = self._inner.propose(state._replace(token_ids=tokens[:at]), self._k)
            drawn = tokens[at : at + len(guess)].tolist()
            right = next((i for i, (g, t) in enumerate(zip(guess, drawn, strict=False)) if g != t), len(drawn))
            if right < len(guess) and at + right == n:
                break  # how much of it is right will be known later
            self._depth.observe(state.seq_id, len(guess), right)
            at += max(right + 1, self.STRIDE)
        self._judged[state.seq_id] = at

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """As `Proposer`."""
        self._inner.observe(seq_id, token_ids)

    def finish(self, seq_id: int) -> None:
        """As `Proposer`."""
        self._inner.finish(seq_id)
        self._judged.pop(seq_id, None)
