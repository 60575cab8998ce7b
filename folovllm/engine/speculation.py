"""The scheduler's side of guessing: whose next tokens are guessed, how many fit into the step, and what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from folovllm.engine.plan import draw_spec
from folovllm.request import Sequence
from folovllm.spec.proposer import Depth, Proposer, RowState
from folovllm.step.draw import DrawSpec
from folovllm.step.schedule import SchedulerOutput

Trim = Callable[[Sequence, list[int]], list[int]]  # the guesses, from the first on, that an answer's form allows


SOON = 8  # steps after which a new sequence is thought of, at the latest
SETTLED = 3  # steps before the end of a rest: one that is neither the first after guesses nor waits for a look


class Begun(NamedTuple):
    """A step that was decided and whose tokens have not come."""

    time: float
    num_seqs: int
    num_tokens: int
    num_guessed: int
    waited: bool


@dataclass(slots=True)
class Known:
    """A sequence that the proposer knows."""

    seq: Sequence
    spec: DrawSpec
    num_told: int  # tokens that the proposer has heard of

    def state(self) -> RowState:
        """As far as the proposer has heard of it."""
        seq = self.seq
        return RowState(
            seq.seq_id, seq.tokens(0, self.num_told), seq.num_prompt_tokens, self.spec, seq.request.cache_salt
        )


class Speculation:
    """Asks the proposer and the depth, and tells them what they must know. It owns what the proposer has heard of.

    While `depth` rests, a step costs a few counters: no sequence is looked at, and what is drawn is told when it is needed.

    Attributes:
        num_drafts, num_guessed, num_accepted: shares with guesses so far, guesses, right ones.
        waited: whether the coming step was to have guesses, and so waits for the newest tokens.
    """

    def __init__(
        self, proposer: Proposer, depth: Depth, trim: Trim, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`trim` cuts guesses to what an answer's form allows; `clock` gives the seconds that steps take."""
        self.proposer = proposer
        self.depth = depth
        self.num_drafts = self.num_guessed = self.num_accepted = 0
        self._trim, self._clock = trim, clock
        self._known: dict[int, Known] = {}  # by seq_id
        self._ks: dict[int, int] | None = None  # what `depth` said for the coming step
        self._asked: dict[int, int] = {}  # what it said last
        self._turn = 0  # of those who get no guesses, whose are looked at next
        self._rest = 0  # steps for which nobody is asked
        self._begun: deque[Begun | None] = deque()  # None: its time does not count
        self._counts = False  # whether that of the coming step does
        self.waited = False
        self._last_end = 0.0

    def wants(self, running: SequenceOf[Sequence]) -> bool:
        """Whether the coming step is to have guesses. `depth` is asked once for each step, and not while it rests."""
        if self._rest:
            return False
        if self._ks is None:
            self._ks = self._asked = self._choose(running)
        return bool(self._ks)

    def _choose(self, running: SequenceOf[Sequence]) -> dict[int, int]:
        seqs = [seq for seq in running if seq.num_tokens - seq.num_computed_tokens < 2]  # some are in flight
        if not seqs:
            return {}
        if most := self.proposer.num_looks():
            idle = [seq for seq in seqs if seq.seq_id not in self._asked]
            first, self._turn = (self._turn, self._turn + most) if self._turn < len(idle) else (0, most)
            self.proposer.look([self._know(seq).state() for seq in idle[first : first + most]])
        ids = [seq.seq_id for seq in seqs]
        chosen = {id_: k for id_, k in zip(ids, self.depth.choose(ids), strict=True) if k > 0}
        self._rest = 0 if chosen else self.depth.rest
        return chosen

    def guess(self, running: SequenceOf[Sequence]) -> dict[int, list[int]]:
        """Guesses for the coming step by seq_id: for sequences of which all tokens but the newest are computed.

        An answer is never guessed beyond its greatest length, nor beyond what its form allows.
        """
        if not self.wants(running):
            self._ks, self._rest = None, max(0, self._rest - 1)
            self._counts, self.waited = self._rest == SETTLED, False
            return {}
        wanted, self._ks, self._counts, self.waited = self._ks or {}, None, True, True
        ready = [seq for seq in running if seq.seq_id in wanted and seq.num_tokens - seq.num_computed_tokens == 1]
        ks = [min(wanted[seq.seq_id], seq.max_tokens - seq.num_output_tokens - 1) for seq in ready]
        found = self.proposer.propose_all([self._know(seq).state() for seq in ready], ks)
        guesses = {}
        for seq, k, guess in zip(ready, ks, found, strict=True):
            if own := self._trim(seq, guess[:k]):
                guesses[seq.seq_id] = own
            elif guess[:k]:
                self.depth.observe(seq.seq_id, 0, 0)  # to propose what a form rules out is to have no idea
        return guesses

    def began(self, output: SchedulerOutput) -> None:
        """Hear of a step that will run."""
        if not self._counts:
            self._begun.append(None)
            return
        num_guessed = sum(share.num_draws - 1 for share in output.shares if share.num_draws > 1)
        start = self._last_end if self._known else self._clock()  # behind another step: what the host does counts, too
        self._begun.append(Begun(start, len(output.shares), output.num_tokens, num_guessed, self.waited))

    def ended(self) -> None:
        """Hear that the tokens of the oldest such step are here. Its time counts from the end of the one before, at the earliest."""
        step, now = self._begun.popleft(), self._clock()
        if step is not None:
            seconds = now - max(step.time, self._last_end)
            self.depth.observe_step(step.num_seqs, step.num_tokens, step.num_guessed, seconds, step.waited)
        self._last_end = now

    def checked(self, seq: Sequence, num_guessed: int, num_accepted: int) -> None:
        """Hear what came of guesses."""
        self.num_drafts += 1
        self.num_guessed += num_guessed
        self.num_accepted += num_accepted
        self.depth.observe(seq.seq_id, num_guessed, num_accepted)

    def wake(self) -> None:
        """Hear that sequences were admitted."""
        self._rest = min(self._rest, SOON)

    def finish(self, seqs: Iterable[Sequence]) -> None:
        """Hear that sequences have ended by themselves: the proposer may learn from the whole of their texts."""
        for seq in seqs:
            self._know(seq)
            self.forget([seq])

    def forget(self, seqs: Iterable[Sequence]) -> None:
        """Hear that sequences have ended."""
        for seq in seqs:
            if self._known.pop(seq.seq_id, None) is not None:
                self.proposer.finish(seq.seq_id)
                self.depth.finish(seq.seq_id)

    def _know(self, seq: Sequence) -> Known:
        """A sequence of which the proposer has now heard all."""
        known = self._known.get(seq.seq_id)
        if known is None:
            known = self._known[seq.seq_id] = Known(seq, draw_spec(seq), seq.num_prompt_tokens)
            self.proposer.admit(known.state())
        if known.num_told < seq.num_tokens:
            self.proposer.observe(seq.seq_id, seq.tokens(known.num_told, seq.num_tokens).tolist())
            known.num_told = seq.num_tokens
        return known
