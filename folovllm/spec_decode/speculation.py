"""The scheduler's side of guessing: whose next tokens are guessed, how many fit into the step, and what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from folovllm.engine.logits_mask import LogitsMask
from folovllm.engine.plan import draw_spec
from folovllm.request import Sequence
from folovllm.spec_decode.budget import Budget
from folovllm.spec_decode.proposer import Depth, Proposer, RowState
from folovllm.step.draw import DrawSpec
from folovllm.step.schedule import SchedulerOutput

SOON = 8  # steps after which a new sequence is thought of, at the latest
FULL = 64  # steps until it is asked again where the last one had no room for guesses
SETTLED = 3  # steps before the end of a rest: one that is neither the first after guesses nor waits for a look
# What is left of the rest before the steps whose end is noted: that one, the one before it, at whose end its time begins, and
# the last, behind which guesses are timed.
NOTED = SETTLED + 2, SETTLED + 1, 1
LOOK = 4  # forced tokens that a look counts


class Begun(NamedTuple):
    """A step that was decided and whose tokens have not come."""

    time: float
    num_seqs: int
    num_tokens: int
    num_guessed: int
    asked: bool
    hidden: float  # seconds of guessing for it that count for no other step


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

    While `depth` rests, a step costs nothing here: no sequence is looked at, and what is drawn is told when it is needed.

    Attributes:
        idle_until: the number of a step; those before it are plain and need not be timed: nothing is asked or told about them.
        num_drafts, num_guessed, num_accepted: shares with guesses so far, guesses, right ones.
        asked: whether the coming step was to have guesses.
        waits: nothing is scheduled behind a step whose time counts. Where a step is computed as it begins, it would else be
            timed with the one that begins before its end is heard of.
    """

    def __init__(
        self,
        proposer: Proposer,
        depth: Depth,
        forms: LogitsMask,
        clock: Callable[[], float] = time.perf_counter,
        budget: Budget | None = None,
        waits: bool = False,
    ) -> None:
        """`clock` gives the seconds that steps take. `budget` does not grow while the engine has nothing to do.

        `waits`: see the attribute.
        """
        self.proposer = proposer
        self.depth = depth
        self.waits = waits
        self.num_drafts = self.num_guessed = self.num_accepted = 0
        self._forms, self._clock, self._budget = forms, clock, budget
        self._known: dict[int, Known] = {}  # by seq_id
        self._chosen: dict[int, int] = {}  # what `depth` said last
        self._turn = 0  # of those who get no guesses, whose are looked at next
        self._rest = 0  # steps behind these for which nobody is asked
        self.idle_until = 0
        self._rest_for(depth.rest, 0)
        self._begun: deque[Begun | None] = deque()  # None: its time does not count
        self._counts = False  # whether that of the coming step does
        self._num_right = 0  # guesses of the step that is taken in
        self.asked = False
        self._last_end = self._hidden = 0.0

    def _choose(self, running: SequenceOf[Sequence], room: int) -> dict[int, int]:
        if room <= 0:
            self._chosen, self._rest = {}, FULL
            return {}
        start = self._clock()
        seqs = [seq for seq in running if seq.num_tokens - seq.num_computed_tokens < 2]  # some are in flight
        if not seqs:
            return {}
        formed = [seq for seq in seqs if seq.params.structured_outputs is not None]
        for seq in formed:
            self.depth.note_form(seq.seq_id)
        looking = self._look([seq for seq in seqs if seq.seq_id not in self._chosen])
        ids = [seq.seq_id for seq in seqs]
        self._chosen = chosen = {id_: k for id_, k in zip(ids, self.depth.choose(ids), strict=True) if k > 0}
        if not chosen and not formed:  # what a form forces needs no look: such an answer is never let sleep for a debt
            self.depth.observe_choice(len(ids), self._clock() - start - looking)
        self._rest = 0 if chosen else self.depth.rest
        return chosen

    def _look(self, idle: list[Sequence]) -> float:
        """Learn what guesses would be worth for those who get none: by what their forms force, and by some of their texts.

        Returns:
            The seconds for the texts: the proposer pays for these.
        """
        for seq in [seq for seq in idle if seq.params.structured_outputs is not None]:
            if (num_forced := len(self._forms.forced(seq, LOOK)) - num_flying(seq)) > 0:
                self._know(seq)
                self.depth.observe(seq.seq_id, num_forced, num_forced)
        most, start = self.proposer.num_looks(), self._clock()
        if most:
            first, self._turn = (self._turn, self._turn + most) if self._turn < len(idle) else (0, most)
            self.proposer.look([self._know(seq).state() for seq in idle[first : first + most]])
        return self._clock() - start

    def _rest_for(self, steps: int, number: int) -> None:
        """Ask nobody for so many steps, from step `number` on."""
        asked = next(left for left in (*NOTED, 0) if left <= steps)
        self.idle_until, self._rest = number + steps - asked, asked

    def guess(self, running: SequenceOf[Sequence], room: int, number: int = 0) -> dict[int, list[int]]:
        """Guesses for the coming step, step `number`, by seq_id: for sequences of which all tokens but the newest are computed.

        The newest may be in flight. It is guessed, too, and the others are of use if that was right; so no step waits for it.
        An answer is never guessed beyond its greatest length, nor beyond what its form allows. Without `room`, the tokens
        that the step may draw for guesses, nobody is asked.
        """
        self._hidden = 0.0
        if not running:  # this may be no step at all, so no rest passes
            self._counts = self.asked = False
            return {}
        wanted = {} if self._rest else self._choose(running, room)
        if not wanted:
            self._counts, self.asked = self._rest == SETTLED + 1, False
            self._rest_for(max(0, self._rest - 1), number + 1)
            return {}
        self._counts = self.asked = True
        ready = [seq for seq in running if seq.seq_id in wanted and seq.num_tokens - seq.num_computed_tokens < 2]
        flying = [num_flying(seq) for seq in ready]
        left = [seq.max_tokens - seq.num_output_tokens - 1 for seq in ready]
        ks = [min(wanted[seq.seq_id] + f, most) for seq, f, most in zip(ready, flying, left, strict=True)]
        start = self._clock()
        found = self.proposer.propose_all([self._know(seq).state() for seq in ready], ks)
        if self._begun and self._begun[-1] is None:
            self._hidden = self._clock() - start  # before the end of a step whose time does not count
        guesses = {}
        for seq, k, f, guess in zip(ready, ks, flying, found, strict=True):
            if guess and self._know(seq).spec.has_form:
                guess = self.proposer.tokens_of(guess)
            guess = longer(self._forms.forced(seq, k), guess[:k])
            if own := self._forms.trim(seq, guess)[f:]:
                guesses[seq.seq_id] = own
            elif k > f:
                self.depth.observe(seq.seq_id, 0, 0)  # to propose what a form rules out is to have no idea, too
        return guesses

    def began(self, output: SchedulerOutput) -> None:
        """Hear of a step that will run."""
        if not self._counts:
            self._begun.append(None)
            return
        num_guessed = sum(share.num_draws - 1 for share in output.shares if share.num_draws > 1)
        start = self._last_end if self._known else self._clock()  # behind another step: what the host does counts, too
        self._begun.append(Begun(start, len(output.shares), output.num_tokens, num_guessed, self.asked, self._hidden))

    def ended(self) -> None:
        """Hear that the oldest such step is taken in. Its time counts from the end of the one before, at the earliest."""
        step, now = self._begun.popleft(), self._clock()
        if step is not None:
            _, num_seqs, num_tokens, num_guessed, asked, hidden = step
            seconds = now - max(step.time, self._last_end) + hidden
            self.depth.observe_step(num_seqs, num_tokens, num_guessed, self._num_right, seconds, asked)
        self._last_end, self._num_right = now, 0

    def checked(self, seq: Sequence, num_guessed: int, num_accepted: int) -> None:
        """Hear what came of guesses."""
        self.num_drafts += 1
        self.num_guessed += num_guessed
        self.num_accepted += num_accepted
        self._num_right += num_accepted
        self.depth.observe(seq.seq_id, num_guessed, num_accepted)

    def wake(self, seq: Sequence, number: int) -> None:
        """Hear, before step `number`, that `seq` may be admitted: it is thought of soon, if it has a form or somebody may look."""
        rest = self.idle_until - number + self._rest
        if rest > SOON and (seq.params.structured_outputs is not None or self.proposer.num_looks()):
            self._rest_for(SOON, number)

    def pause(self) -> None:
        """Hear that there is nothing to do until `resume`."""
        if self._budget is not None:
            self._budget.pause()

    def resume(self) -> None:
        """Hear that there is something to do again."""
        if self._budget is not None:
            self._budget.resume()

    def finish(self, seqs: Iterable[Sequence]) -> None:
        """Hear that sequences have ended by themselves: the proposer may learn from the whole of their texts."""
        for seq in seqs:
            if seq.seq_id in self._known:
                self._know(seq)
                self.forget([seq])
            else:
                self.proposer.remember(seq.tokens(seq.num_prompt_tokens, seq.num_tokens), seq.request.cache_salt)
                self.depth.finish(seq.seq_id)

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


def num_flying(seq: Sequence) -> int:
    """1 if its newest token has not arrived."""
    return 1 + seq.num_computed_tokens - seq.num_tokens


def longer(forced: list[int], guess: list[int]) -> list[int]:
    """What goes on further where both say the same; else what is forced."""
    return guess if guess[: len(forced)] == forced else forced
