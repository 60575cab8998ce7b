"""The scheduler's side of drafting: it decides which sequences get drafts, and reports what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from folovllm.electives.spec_decode.policy import LengthPolicy
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.request import Sequence, SequenceStatus, sampling_spec
from folovllm.step.schedule import SamplingSpec

NO_ROOM = 64  # steps without drafts after a step that had no room for draft tokens
SETTLE, TIMED = 2, 6  # in a rest: the steps until steps overlap again, and the steps that are timed then


@dataclass(slots=True)
class AdmittedSequence:
    """A sequence that was admitted to the proposer."""

    seq: Sequence
    spec: SamplingSpec
    num_observed: int  # tokens of which the proposer was told

    def state(self) -> RowState:
        """Return the sequence with the tokens of which the proposer was told."""
        seq = self.seq
        return RowState(
            seq.seq_id, seq.tokens(0, self.num_observed), seq.num_prompt_tokens, self.spec, seq.request.cache_salt,
            num_in_flight(seq),
        )  # fmt: skip


class DraftRules:
    """Rules of grammars for drafts. This class has none; the manager of structured output has the same methods."""

    def trim(self, seq: Sequence, draft: list[int]) -> list[int]:
        """Return the start of `draft` that the grammar of `seq` allows."""
        return draft

    def forced(self, seq: Sequence, most: int) -> list[int]:
        """Return at most `most` jump-forward tokens: those that the grammar forces next. Empty where there is a choice."""
        return []


class Timed(NamedTuple):
    """Steps that are being timed."""

    seq_ids: frozenset[int]
    number: int  # of the step after them
    start: float
    has_drafts: bool


class Speculation:
    """Asks the policy for draft lengths and the proposer for drafts, and reports to both what came of them.

    While the policy rests, a step costs nothing here: the proposer gets all tokens of the rest when it is next asked.

    Attributes:
        propose_from: the number of the next step for which `propose` must be called.
        num_drafts, num_draft_tokens, num_accepted: drafts that were verified so far, their tokens, and the accepted ones.
    """

    def __init__(
        self,
        proposer: Proposer,
        policy: LengthPolicy,
        rules: DraftRules,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` returns seconds; proposer and steps are timed by it."""
        self.proposer, self.policy = proposer, policy
        self.num_drafts = self.num_draft_tokens = self.num_accepted = 0
        self.propose_from = 0
        self.rules, self._clock = rules, clock
        self._admitted: dict[int, AdmittedSequence] = {}  # by seq_id
        self._rest_until = 0  # the step from which on the policy is asked; grammars may force tokens earlier
        self._timed: Timed | None = None
        self._time_from = -1  # the step of a rest from which on steps are timed
        self._by_proposer: set[int] = set()  # seq_ids whose last draft came from the proposer, not from a grammar

    def propose(self, running: SequenceOf[Sequence], room: int, number: int) -> dict[int, list[int]]:
        """Return drafts for step `number`, by seq_id, for sequences of which all tokens but the newest are computed.

        The newest may be in flight. Then the proposer drafts it, too, so that the step need not wait for it. A draft ends where
        the answer reaches its greatest length, or the grammar allows no more. `room`: the most draft tokens of the step.
        """
        self._by_proposer = set()
        now, seq_ids = self._clock(), frozenset(seq.seq_id for seq in running)
        self._report_times(seq_ids, number, now)
        seqs = [seq for seq in running if seq.num_tokens - seq.num_computed_tokens < 2]
        if not seqs or room <= 0:
            self.propose_from = number + (NO_ROOM if seqs else 0)
            return {}
        constrained = [seq for seq in seqs if seq.params.structured_outputs is not None]
        drafts = self._by_policy(seqs, number) if number >= self._rest_until else {}
        drafts = self._jump_forward(constrained, len(seqs), drafts)
        self.propose_from = number if constrained else self._rest_until
        if not constrained and len(seqs) == len(running):
            self._time_steps(seqs, Timed(seq_ids, number + 1, now, True), bool(drafts))
        return drafts

    def _time_steps(self, seqs: list[Sequence], step: Timed, has_drafts: bool) -> None:
        """Begin to time this step if it has drafts, else, early in a rest, the next few steps. `propose` is called after them.

        No step with drafts is timed while another is in flight, since it would wait for that one, too.
        """
        number = step.number - 1
        if has_drafts:
            self._timed = None if any(map(num_in_flight, seqs)) else step
        elif number < self._time_from:
            self.propose_from = min(self.propose_from, self._time_from)
        elif number == self._time_from:
            self._timed = step._replace(number=number + TIMED, has_drafts=False)
            self.propose_from = min(self.propose_from, number + TIMED)

    def _report_times(self, seq_ids: frozenset[int], number: int, now: float) -> None:
        """Report the seconds of timed steps to the policy, unless sequences came, or half of them left."""
        timed = self._timed
        if timed is None or number < timed.number:
            return
        self._timed = None
        if number == timed.number and seq_ids <= timed.seq_ids and 2 * len(seq_ids) > len(timed.seq_ids):
            steps = 1 if timed.has_drafts else TIMED
            self.policy.observe_steps(len(timed.seq_ids), (now - timed.start) / steps, timed.has_drafts)

    def _by_policy(self, seqs: list[Sequence], number: int) -> dict[int, list[int]]:
        """Ask the policy for lengths and the proposer for drafts. Return the drafts, as far as grammars allow them."""
        start = self._clock()
        lengths = self.policy.lengths([seq.seq_id for seq in seqs])
        if not any(lengths):
            self._rest_until = number + 1 + self.policy.rest
            self._time_from = number + SETTLE
            return {}
        wanted = [
            (seq, min(length + num_in_flight(seq), num_left(seq)))
            for seq, length in zip(seqs, lengths, strict=True)
            if length
        ]
        wanted = [(seq, k) for seq, k in wanted if k > num_in_flight(seq)]
        if not wanted:
            return {}
        ks = [k for _, k in wanted]
        found = self.proposer.propose_all([self._update_proposer(seq).state() for seq, _ in wanted], ks)
        drafts = {}
        for (seq, k), draft in zip(wanted, found, strict=True):
            if draft and self._admitted[seq.seq_id].spec.has_grammar:
                draft = self.proposer.resolve(draft)
            if own := self.rules.trim(seq, draft[:k])[num_in_flight(seq) :]:
                drafts[seq.seq_id] = own
                self._by_proposer.add(seq.seq_id)
            else:
                self.policy.observe(seq.seq_id, 0, 0)  # a draft that the grammar rejects counts as no draft
        self.policy.observe_drafting(len(seqs), max(ks), sum(map(len, drafts.values())), self._clock() - start)
        return drafts

    def _jump_forward(
        self, constrained: list[Sequence], num_seqs: int, drafts: dict[int, list[int]]
    ) -> dict[int, list[int]]:
        """Return `drafts`; where a grammar forces tokens, these replace a draft that is shorter or differs. It counts as no draft."""
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
        """Note a sequence that comes before step `number`. If it has a grammar, `propose` must be called at once, even in a rest."""
        if seq.params.structured_outputs is not None:
            self.propose_from = number

    def finish(self, seqs: Iterable[Sequence]) -> None:
        """Drop sequences that have ended. The proposer also gets the answers that were not aborted."""
        for seq in seqs:
            is_complete = seq.status is not SequenceStatus.FINISHED_ABORTED
            if seq.seq_id in self._admitted:
                if is_complete:
                    self._update_proposer(seq)
                del self._admitted[seq.seq_id]
                self.proposer.finish(seq.seq_id)
            elif is_complete:
                self.proposer.remember(seq.tokens(seq.num_prompt_tokens, seq.num_tokens), seq.request.cache_salt)
            self.policy.forget(seq.seq_id)

    def _update_proposer(self, seq: Sequence) -> AdmittedSequence:
        """Admit a sequence to the proposer if it is new there, and tell it all tokens."""
        admitted = self._admitted.get(seq.seq_id)
        if admitted is None:
            admitted = self._admitted[seq.seq_id] = AdmittedSequence(seq, sampling_spec(seq), seq.num_prompt_tokens)
            self.proposer.admit(admitted.state())
        if admitted.num_observed < seq.num_tokens:
            self.proposer.observe(seq.seq_id, seq.tokens(admitted.num_observed, seq.num_tokens).tolist())
            admitted.num_observed = seq.num_tokens
        return admitted


def num_in_flight(seq: Sequence) -> int:
    """Return 1 if the newest token of `seq` has not arrived, else 0."""
    return 1 + seq.num_computed_tokens - seq.num_tokens


def num_left(seq: Sequence) -> int:
    """Return how many tokens may be drafted for `seq`, one in flight included. The last token of an answer is never drafted."""
    return max(0, seq.max_tokens - seq.num_output_tokens - 1)
