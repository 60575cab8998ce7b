"""The scheduler's side of guessing: whose next tokens are guessed, how many fit into the step, and what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from folovllm.engine.plan import draw_spec
from folovllm.request import Sequence
from folovllm.spec.proposer import Depth, Proposer, RowState
from folovllm.step.draw import DrawSpec
from folovllm.step.schedule import SchedulerOutput

Trim = Callable[[Sequence, list[int]], list[int]]  # the guesses, from the first on, that an answer's form allows


class Begun(NamedTuple):
    """A step that was decided and whose tokens have not come."""

    time: float
    num_seqs: int
    num_tokens: int
    num_guessed: int


class Speculation:
    """Asks the proposer and the depth, and tells them what they must know. It owns who of the sequences was admitted."""

    def __init__(
        self, proposer: Proposer, depth: Depth, trim: Trim, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`trim` cuts guesses to what an answer's form allows; `clock` gives the seconds that steps take."""
        self.proposer = proposer
        self.depth = depth
        self.num_drafts = self.num_guessed = self.num_accepted = 0  # shares with guesses, guesses, right ones
        self._trim, self._clock = trim, clock
        self._specs: dict[int, DrawSpec] = {}  # of admitted sequences, by seq_id
        self._ks: dict[int, int] | None = None  # what `depth` said for the coming step
        self._begun: deque[Begun] = deque()
        self._last_end = 0.0

    def wants(self, running: SequenceOf[Sequence]) -> bool:
        """Whether the coming step is to have guesses. `depth` is asked once for each step."""
        if self._ks is None:
            ids = [seq.seq_id for seq in running if seq.num_tokens - seq.num_computed_tokens < 2]  # some are in flight
            self._ks = {id_: k for id_, k in zip(ids, self.depth.choose(ids), strict=True) if k > 0} if ids else {}
        return bool(self._ks)

    def guess(self, running: SequenceOf[Sequence]) -> dict[int, list[int]]:
        """Guesses for the coming step by seq_id: for sequences of which all tokens but the newest are computed.

        An answer is never guessed beyond its greatest length, nor beyond what its form allows.
        """
        if not self.wants(running):
            self._ks = None
            return {}
        wanted, self._ks = self._ks or {}, None
        wanted = {id_: k for id_, k in wanted.items() if id_ in self._specs}
        ready = [seq for seq in running if seq.seq_id in wanted and seq.num_tokens - seq.num_computed_tokens == 1]
        ks = [min(wanted[seq.seq_id], seq.max_tokens - seq.num_output_tokens - 1) for seq in ready]
        found = self.proposer.propose_all([self._state(seq) for seq in ready], ks)
        guesses = {seq.seq_id: self._trim(seq, g[:k]) for seq, g, k in zip(ready, found, ks, strict=True) if g[:k]}
        return {seq_id: own for seq_id, own in guesses.items() if own}

    def began(self, output: SchedulerOutput) -> None:
        """Hear of a step that will run."""
        num_guessed = sum(share.num_draws - 1 for share in output.shares if share.num_draws > 1)
        start = self._last_end if self._specs else self._clock()  # behind another step: what the host does counts, too
        self._begun.append(Begun(start, len(output.shares), output.num_tokens, num_guessed))

    def ended(self) -> None:
        """Hear that the tokens of the oldest such step are here. Its time counts from the end of the one before, at the earliest."""
        step, now = self._begun.popleft(), self._clock()
        self.depth.observe_step(step.num_seqs, step.num_tokens, step.num_guessed, now - max(step.time, self._last_end))
        self._last_end = now

    def checked(self, seq: Sequence, num_guessed: int, num_accepted: int) -> None:
        """Hear what came of guesses."""
        self.num_drafts += 1
        self.num_guessed += num_guessed
        self.num_accepted += num_accepted
        self.depth.observe(seq.seq_id, num_guessed, num_accepted)

    def learn(self, seq: Sequence, first: int) -> None:
        """Take in that `seq` got its tokens from `first` on, and whether it has ended."""
        if seq.seq_id not in self._specs:
            self._specs[seq.seq_id] = draw_spec(seq)
            self.proposer.admit(self._state(seq, first))
        self.proposer.observe(seq.seq_id, seq.tokens(first, seq.num_tokens).tolist())
        if seq.status.is_finished:
            self.forget([seq])

    def forget(self, seqs: Iterable[Sequence]) -> None:
        """Hear that sequences have ended."""
        for seq in seqs:
            if self._specs.pop(seq.seq_id, None) is not None:
                self.proposer.finish(seq.seq_id)
                self.depth.finish(seq.seq_id)

    def _state(self, seq: Sequence, end: int | None = None) -> RowState:
        tokens = seq.tokens(0, seq.num_tokens if end is None else end)
        return RowState(seq.seq_id, tokens, seq.num_prompt_tokens, self._specs[seq.seq_id], seq.request.cache_salt)
