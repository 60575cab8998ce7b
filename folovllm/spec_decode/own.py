"""A proposer that somebody else wrote."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from folovllm.spec_decode.proposer import InTurn, Proposer, RowState


class Own(InTurn):
    """Asks it, and cuts its guesses off where they are no tokens of the vocabulary: for a step such numbers have a meaning."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        super().__init__([proposer])
        self._vocab_size = vocab_size

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """As `Proposer`."""
        return [
            list(takewhile(lambda token: 0 <= token < self._vocab_size, guess))
            for guess in super().propose_all(states, ks)
        ]
