"""The proposer for a draft head: it asks the device for chains, and returns their tokens or placeholder ids for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from folovllm.electives.spec_decode.head_runner import CHAIN
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.executor.abstract import Executor, Pending
from folovllm.step.schedule import NO_TOKENS, ScheduledSequence, SchedulerOutput


class HeadProposer(Proposer):
    """Asks the device for a chain of drafts. The device has all that this needs: each sequence's K/V and last hidden states.

    Where steps are packed, a chain is started and its tokens stay on the device: token i of column s (0: the sequence's newest
    one) has the placeholder id `vocab_size + i * num_rows + s` (`DraftTokens`). Else the tokens are known at once.
    """

    def __init__(self, vocab_size: int, num_rows: int, uses_placeholders: bool) -> None:
        """`num_rows`: of `DraftTokens`. `uses_placeholders`: steps are packed, so drafts consist of placeholder ids."""
        self._executor: Executor | None = None
        self._row_of: Callable[[int], int] = lambda seq_id: 0
        self._first, self._num_rows, self._uses_placeholders = vocab_size, num_rows, uses_placeholders
        self._pending: Pending | None = None
        self._tokens: list[list[int]] | None = None  # of the last chain, by column

    def bind(self, executor: Executor, row_of: Callable[[int], int]) -> None:
        self._executor, self._row_of = executor, row_of

    def propose(self, state: RowState, k: int) -> list[int]:
        return self.propose_all([state], [k])[0]

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """Return the drafts of one chain. A draft begins with the newest token if that is in flight."""
        lengths = [max(0, k - state.num_in_flight) for state, k in zip(states, ks, strict=True)]
        columns = {i: column for column, i in enumerate(i for i, length in enumerate(lengths) if length)}
        if not columns:
            return [[] for _ in states]
        assert self._executor is not None
        scheduled_seqs = tuple(self._scheduled(states[i]) for i in columns)
        asked = np.array([[0, max(lengths)]], np.int32)
        self._pending, self._tokens = self._executor.submit(SchedulerOutput(scheduled_seqs, (), {CHAIN: asked})), None
        firsts = [1 - state.num_in_flight for state in states]
        return [self._draft(columns[i], firsts[i], lengths[i] + 1) if i in columns else [] for i in range(len(states))]

    def _draft(self, column: int, first: int, end: int) -> list[int]:
        if not self._uses_placeholders:
            return self._chain_tokens()[column][first:end]
        return [self._first + i * self._num_rows + column for i in range(first, end)]

    def resolve(self, draft: Sequence[int]) -> list[int]:
        return [token if token < self._first else self._token_at(token - self._first) for token in draft]

    def _token_at(self, offset: int) -> int:
        return self._chain_tokens()[offset % self._num_rows][offset // self._num_rows]

    def _chain_tokens(self) -> list[list[int]]:
        """Return the tokens of the last chain, by column. Waits for them."""
        if self._tokens is None:
            assert self._pending is not None
            self._tokens = self._pending.wait().token_ids
        return self._tokens

    def _scheduled(self, state: RowState) -> ScheduledSequence:
        """Return the newest token of a sequence, as a decode."""
        end = len(state.token_ids) + state.num_in_flight
        tokens = NO_TOKENS if state.num_in_flight else state.token_ids[-1:]
        return ScheduledSequence(state.seq_id, self._row_of(state.seq_id), end - 1, end, tokens, (), 0, 1, None)
