"""Proposers that ask a device for chains of drafts, and return their tokens or placeholder ids for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from folovllm.electives.spec_decode.chain import CHAIN
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.executor.abstract import Executor, Pending
from folovllm.step.schedule import NO_TOKENS, ScheduledSequence, SchedulerOutput


class ChainProposer(Proposer):
    """Starts chains on a device (`ChainGraphRunner`). A subclass says which sequences are drafted for.

    Where the model that verifies finds the tokens on its device, drafts consist of placeholder ids: token i of column s (0: the
    sequence's newest one) has the id `vocab_size + i * max_num_seqs + s` (`DraftTokens`). Else the host waits for the tokens.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, uses_placeholders: bool) -> None:
        self._first, self._num_columns, self._uses_placeholders = vocab_size, max_num_seqs, uses_placeholders
        self._pending: Pending | None = None
        self._tokens: list[list[int]] = []  # of the last chain, by column, once they are known

    def propose(self, state: RowState, k: int) -> list[int]:
        return self.propose_all([state], [k])[0]

    def _run_chain(
        self, executor: Executor, newest: Sequence[ScheduledSequence], spans: Sequence[tuple[int, int]]
    ) -> list[list[int]]:
        """Start a chain behind the `newest` tokens of sequences, and return the tokens of each from `start` to `end` of its span."""
        asked = np.array([[0, max(end for _, end in spans) - 1]], np.int32)
        self._pending, self._tokens = executor.submit(SchedulerOutput(tuple(newest), (), {CHAIN: asked})), []
        if not self._uses_placeholders:
            return [tokens[start:end] for tokens, (start, end) in zip(self._chain_tokens(), spans, strict=True)]
        columns = [range(self._first + column, 1 << 62, self._num_columns) for column in range(len(spans))]
        return [[*column[start:end]] for column, (start, end) in zip(columns, spans, strict=True)]

    def resolve(self, draft: Sequence[int]) -> list[int]:
        return [token if token < self._first else self._token_at(token - self._first) for token in draft]

    def _token_at(self, offset: int) -> int:
        return self._chain_tokens()[offset % self._num_columns][offset // self._num_columns]

    def _chain_tokens(self) -> list[list[int]]:
        """Return the tokens of the last chain, by column. Waits for them."""
        if not self._tokens:
            assert self._pending is not None
            self._tokens = self._pending.wait().token_ids
        return self._tokens


class HeadProposer(ChainProposer):
    """Drafts by a head. Its device has all that this needs: each sequence's K/V and last hidden states."""

    _executor: Executor
    _row_of: Callable[[int], int]

    def bind(self, executor: Executor, row_of: Callable[[int], int]) -> None:
        self._executor, self._row_of = executor, row_of

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """Return the drafts of one chain. A draft begins with the newest token if that is in flight."""
        drafts: list[list[int]] = [[] for _ in states]
        asked = [i for i, (state, k) in enumerate(zip(states, ks, strict=True)) if k > state.num_in_flight]
        if asked:
            spans = [(1 - states[i].num_in_flight, 1 - states[i].num_in_flight + ks[i]) for i in asked]
            found = self._run_chain(self._executor, [self._newest(states[i]) for i in asked], spans)
            for i, draft in zip(asked, found, strict=True):
                drafts[i] = draft
        return drafts

    def _newest(self, state: RowState) -> ScheduledSequence:
        """Return the newest token of a sequence, as a decode."""
        end = len(state.token_ids) + state.num_in_flight
        tokens = NO_TOKENS if state.num_in_flight else state.token_ids[-1:]
        return ScheduledSequence(state.seq_id, self._row_of(state.seq_id), end - 1, end, tokens, (), 0, 1, None)
