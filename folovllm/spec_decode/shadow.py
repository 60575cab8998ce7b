"""Guesses that nobody checks: for sequences that get none, they are compared with what was drawn anyway."""

from __future__ import annotations

from collections.abc import Sequence

from folovllm.spec_decode.budget import Budget
from folovllm.spec_decode.proposer import Depth, InTurn, Proposer, RowState


class Shadow(InTurn):
    """A proposer whose guesses are scored also for sequences that no guess is asked for.

    It looks back at texts that have grown meanwhile, at a few of them and now and then, as the budget allows, however large
    the batch is; `Depth` takes them for a sample.
    """

    REACH, STRIDE = 24, 4  # tokens: how far a look goes back, and from one guess that says nothing to the next

    def __init__(self, inner: Proposer, depth: Depth, budget: Budget, k: int = 4, most: int = 4) -> None:
        """`k`: tokens of a guess. `most`: sequences that are looked at in turn; 0 for a dear proposer."""
        super().__init__([inner])
        self._inner, self._depth, self._budget, self._k, self._most = inner, depth, budget, k, most
        self._judged: dict[int, int] = {}  # tokens of each sequence that a guess was compared with, by seq_id

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """As `Proposer`; says how long it took, unless a dear one sat out."""
        start = self._budget.clock()
        found = self._inner.propose_all(states, ks)
        self.work, num_turns = self._inner.work, max(ks, default=0)
        num_read = max((self._grown(state) for state, k in zip(states, ks, strict=True) if k), default=0)
        if self.is_dear:
            num_turns, num_read = self.work or (0, 0)
        if num_turns or num_read:
            self._depth.observe_guessing(num_turns if num_read <= num_turns else 0, self._budget.clock() - start)
        for state, k in zip(states, ks, strict=True):
            if k:
                self._judged[state.seq_id] = len(state.token_ids) + 1  # those are judged by the model
        return found

    def _grown(self, state: RowState) -> int:
        return len(state.token_ids) - self._judged.get(state.seq_id, 0)

    def num_looks(self) -> int:
        """As `Proposer`: none while something is owed."""
        return self._most if self._most and self._budget.left() > 0 else 0

    def look(self, states: Sequence[RowState]) -> None:
        """As `Proposer`."""
        start = self._budget.clock()
        self._inner.look(states)
        for state in states:
            self._score(state)
            end = self._budget.clock()
            self._budget.pay(end - start)
            start = end
            if self._budget.left() <= 0:
                break

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

    def finish(self, seq_id: int) -> None:
        """As `Proposer`."""
        super().finish(seq_id)
        self._judged.pop(seq_id, None)
