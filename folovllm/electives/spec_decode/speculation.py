"""The scheduler's side of drafting: for which sequences a draft is asked for, when none is, and what came of drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from folovllm.electives.spec_decode.policy import LengthPolicy
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.engine.sampling_spec import sampling_spec
from folovllm.request import Sequence, SequenceStatus
from folovllm.step.schedule import SamplingSpec

FULL = 64  # steps until the policy is asked again where a step had no room for draft tokens
SETTLE, TIMED = 2, 6  # steps of a rest until steps overlap again; then so many are timed


@dataclass(slots=True)
class Known:
    """A sequence that was admitted to the proposer."""

    seq: Sequence
    spec: SamplingSpec
    num_observed: int  # tokens that the proposer has

    def state(self) -> RowState:
        """Return the sequence with the tokens that the proposer has."""
        seq = self.seq
        return RowState(
            seq.seq_id, seq.tokens(0, self.num_observed), seq.num_prompt_tokens, self.spec, seq.request.cache_salt,
            num_in_flight(seq),
        )  # fmt: skip


class DraftRules:
    """What limits the drafts of sequences. This one limits none; structured output's manager has the same methods."""

    def trim(self, seq: Sequence, draft: list[int]) -> list[int]:
        """The draft tokens, from the first on, that `seq` may have."""
        return draft

    def forced(self, seq: Sequence, most: int) -> list[int]:
        """Jump-forward tokens: at most so many that come next because nothing else may. Empty where there is a choice."""
        return []


class Timed(NamedTuple):
    """Steps that are being timed."""

    seq_ids: frozenset[int]
    number: int  # of the step behind them
    start: float
    has_drafts: bool


class Speculation:
    """Asks the policy for draft lengths and the proposer for drafts, and reports to both what came of them.

    While the policy rests, a step costs nothing here: no sequence is looked at, and the proposer gets the sampled tokens when
    it is asked again.

    Attributes:
        asleep_until: the number of a step; `propose` need not be called for those before it.
        num_drafts, num_draft_tokens, num_accepted: drafts that were verified so far, their tokens, and the accepted ones.
        asked: whether the proposer was asked for the coming step.
    """

    def __init__(
        self,
        proposer: Proposer,
        policy: LengthPolicy,
        rules: DraftRules,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` gives the seconds that the proposer takes."""
        self.proposer, self.policy = proposer, policy
        self.num_drafts = self.num_draft_tokens = self.num_accepted = 0
        self.asleep_until, self.asked = 0, False
        self.rules, self._clock = rules, clock
        self._known: dict[int, Known] = {}  # by seq_id
        self._rest_until = 0  # `asleep_until` of the proposer alone: drafts of a grammar may be due earlier
        self._timed: Timed | None = None
        self._settled = -1  # the step of a rest from which on steps are timed
        self._by_proposer: set[int] = set()  # whose drafts of the last step are the proposer's, by seq_id

    def propose(self, running: SequenceOf[Sequence], room: int, number: int) -> dict[int, list[int]]:
        """Return drafts for step `number`, by seq_id, for sequences of which all tokens but the newest are computed.

        The newest may be in flight. Then it is drafted, too, so that the step need not wait for it. A draft ends where the
        answer reaches its greatest length, or the grammar allows no more. `room`: draft tokens that the step may verify at most.
        """
        self.asked, self._by_proposer = False, set()
        now, seq_ids = self._clock(), frozenset(seq.seq_id for seq in running)
        self._tell_times(seq_ids, number, now)
        seqs = [seq for seq in running if seq.num_tokens - seq.num_computed_tokens < 2]
        if not seqs or room <= 0:
            self.asleep_until = number + (FULL if seqs else 0)
            return {}
        constrained = [seq for seq in seqs if seq.params.structured_outputs is not None]
        drafts = self._by_policy(seqs, number) if number >= self._rest_until else {}
        drafts = self._jump_forward(constrained, len(seqs), drafts)
        self.asleep_until = number if constrained else self._rest_until
        if not constrained and len(seqs) == len(running):
            self._time_steps(seqs, Timed(seq_ids, number + 1, now, True), bool(drafts))
        return drafts

    def _time_steps(self, seqs: list[Sequence], step: Timed, has_drafts: bool) -> None:
        """Time this step if it has drafts, and some steps at the beginning of a rest; `propose` is called for what follows them.

        Behind a step in flight none is timed, for it would wait for that one, too.
        """
        number = step.number - 1
        if has_drafts:
            self._timed = None if any(map(num_in_flight, seqs)) else step
        elif number < self._settled:
            self.asleep_until = min(self.asleep_until, self._settled)
        elif number == self._settled:
            self._timed = step._replace(number=number + TIMED, has_drafts=False)
            self.asleep_until = min(self.asleep_until, number + TIMED)

    def _tell_times(self, seq_ids: frozenset[int], number: int, now: float) -> None:
        """Tell the policy what the timed steps took, if no sequence came meanwhile and none had left before."""
        timed = self._timed
        if timed is None or number < timed.number:
            return
        self._timed = None
        if number == timed.number and seq_ids <= timed.seq_ids and 2 * len(seq_ids) > len(timed.seq_ids):
            steps = 1 if timed.has_drafts else TIMED
            self.policy.observe_steps(len(timed.seq_ids), (now - timed.start) / steps, timed.has_drafts)

    def _by_policy(self, seqs: list[Sequence], number: int) -> dict[int, list[int]]:
        """Return the proposer's drafts, of the lengths that the policy gives."""
        start = self._clock()
        lengths = self.policy.lengths([seq.seq_id for seq in seqs])
        if not any(lengths):
            self._rest_until = number + 1 + self.policy.rest
            self._settled = number + SETTLE
            return {}
        wanted = [
            (seq, min(length + num_in_flight(seq), num_left(seq)))
            for seq, length in zip(seqs, lengths, strict=True)
            if length
        ]
        wanted = [(seq, k) for seq, k in wanted if k > num_in_flight(seq)]
        if not wanted:
            return {}
        self.asked, ks = True, [k for _, k in wanted]
        found = self.proposer.propose_all([self._know(seq).state() for seq, _ in wanted], ks)
        drafts = {}
        for (seq, k), draft in zip(wanted, found, strict=True):
            if draft and self._known[seq.seq_id].spec.has_grammar:
                draft = self.proposer.resolve(draft)
            if own := self.rules.trim(seq, draft[:k])[num_in_flight(seq) :]:
                drafts[seq.seq_id] = own
                self._by_proposer.add(seq.seq_id)
            else:
                self.policy.observe(seq.seq_id, 0, 0)  # a draft that the grammar rejects counts as no draft
        self.policy.observe_asked(len(seqs), max(ks), sum(map(len, drafts.values())), self._clock() - start)
        return drafts

    def _jump_forward(
        self, constrained: list[Sequence], num_seqs: int, drafts: dict[int, list[int]]
    ) -> dict[int, list[int]]:
        """Return `drafts`, with the tokens that a grammar forces in place of shorter or other drafts, which count as none."""
        forced = {}
        for seq in constrained:
            first = num_in_flight(seq)
            most = min(num_left(seq), self.policy.most + first)
            tokens = self.rules.trim(seq, self.rules.forced(seq, most))[first:]
            draft = drafts.get(seq.seq_id, [])
            if tokens and not (len(draft) > len(tokens) and draft[: len(tokens)] == tokens):
                forced[seq.seq_id] = tokens
                if draft:
                    self._by_proposer.discard(seq.seq_id)
                    self.policy.observe(seq.seq_id, 0, 0)
        if not drafts and not self.policy.pays(num_seqs, sum(map(len, forced.values()))):
            return {}
        return drafts | forced

    def verified(self, seq: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        """Record what came of a draft."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted += num_accepted
        if seq.seq_id in self._by_proposer:
            self.policy.observe(seq.seq_id, num_draft_tokens, num_accepted)

    def add(self, seq: Sequence, number: int) -> None:
        """Add a sequence before step `number`: a rest does not hold up drafts of its grammar."""
        if seq.params.structured_outputs is not None:
            self.asleep_until = number

    def finish(self, seqs: Iterable[Sequence]) -> None:
        """Drop sequences that have ended. The proposer may learn from those that ended by themselves."""
        for seq in seqs:
            is_whole = seq.status is not SequenceStatus.FINISHED_ABORTED
            if seq.seq_id in self._known:
                if is_whole:
                    self._know(seq)
                del self._known[seq.seq_id]
                self.proposer.finish(seq.seq_id)
            elif is_whole:
                self.proposer.remember(seq.tokens(seq.num_prompt_tokens, seq.num_tokens), seq.request.cache_salt)
            self.policy.forget(seq.seq_id)

    def _know(self, seq: Sequence) -> Known:
        """Give the proposer all tokens of a sequence."""
        known = self._known.get(seq.seq_id)
        if known is None:
            known = self._known[seq.seq_id] = Known(seq, sampling_spec(seq), seq.num_prompt_tokens)
            self.proposer.admit(known.state())
        if known.num_observed < seq.num_tokens:
            self.proposer.observe(seq.seq_id, seq.tokens(known.num_observed, seq.num_tokens).tolist())
            known.num_observed = seq.num_tokens
        return known


def num_in_flight(seq: Sequence) -> int:
    """Return 1 if the newest token of `seq` has not arrived, else 0."""
    return 1 + seq.num_computed_tokens - seq.num_tokens


def num_left(seq: Sequence) -> int:
    """Return how many tokens may be drafted for `seq`, one in flight included. The last token of an answer is never drafted."""
    return max(0, seq.max_tokens - seq.num_output_tokens - 1)
