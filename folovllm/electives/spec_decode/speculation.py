"""The scheduler's side of drafting: it decides which sequences get drafts, and reports what came of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from time import perf_counter

from folovllm.electives.spec_decode.policy import LengthPolicy
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.request import Sequence, SequenceStatus, sampling_spec
from folovllm.step.schedule import SamplingSpec

NO_ROOM = 64  # steps without drafts after a step that had no room for draft tokens


class DraftRules:
    """Rules of grammars for drafts. This class has none; the manager of structured output has the same methods."""

    def trim(self, seq: Sequence, draft: list[int]) -> list[int]:
        """Return the start of `draft` that the grammar of `seq` allows."""
        return draft

    def forced(self, seq: Sequence, most: int) -> list[int]:
        """Return at most `most` jump-forward tokens: those that the grammar forces next. Empty where there is a choice."""
        return []


class Speculation:
    """Asks the policy for draft lengths and the proposer for drafts, and reports to both what came of them.

    Attributes:
        propose_from: the number of the next step for which `propose` must be called. While the policy rests, a step costs
            nothing here.
        rules: those of grammars.
        num_drafts, num_draft_tokens, num_accepted: drafts that were verified so far, their tokens, and the accepted ones.
    """

    def __init__(
        self, proposer: Proposer, policy: LengthPolicy, rules: DraftRules, clock: Callable[[], float] = perf_counter
    ) -> None:
        """`clock` returns seconds; the proposer is timed by it."""
        self.proposer, self.policy, self.rules, self._clock = proposer, policy, rules, clock
        self.num_drafts = self.num_draft_tokens = self.num_accepted = 0
        self.propose_from = 0
        self._rest_until = 0  # the step from which on the policy is asked; grammars may force tokens earlier
        self._specs: dict[int, SamplingSpec] = {}  # by seq_id, of sequences that the proposer knows
        self._by_proposer: set[int] = set()  # seq_ids whose last draft came from the proposer, not from a grammar

    def propose(self, running: SequenceOf[Sequence], room: int, number: int) -> dict[int, list[int]]:
        """Return drafts for step `number`, by seq_id, for sequences of which all tokens but the newest are computed.

        The newest may be in flight. Then the proposer drafts it, too, so that the step need not wait for it. A draft ends where
        the answer reaches its greatest length, or the grammar allows no more. `room`: the most draft tokens of the step.
        """
        self._by_proposer = set()
        seqs = [seq for seq in running if seq.num_tokens - seq.num_computed_tokens < 2]
        if not seqs or room <= 0:
            self.propose_from = number + (NO_ROOM if seqs else 0)
            return {}
        constrained = [seq for seq in seqs if seq.params.structured_outputs is not None]
        drafts = self._by_policy(seqs, number) if number >= self._rest_until else {}
        drafts = self._jump_forward(constrained, len(seqs), drafts)
        self.propose_from = number if constrained else self._rest_until
        return drafts

    def _by_policy(self, seqs: list[Sequence], number: int) -> dict[int, list[int]]:
        """Ask the policy for lengths and the proposer for drafts. Return the drafts, as far as grammars allow them."""
        start = self._clock()
        lengths = self.policy.lengths([seq.seq_id for seq in seqs])
        if not any(lengths):
            self._rest_until = number + 1 + self.policy.rest
            return {}
        wanted = {
            seq: k
            for seq, length in zip(seqs, lengths, strict=True)
            if length and (k := min(length + num_in_flight(seq), num_left(seq))) > num_in_flight(seq)
        }
        if not wanted:
            return {}
        found = self.proposer.propose_all([*map(self._state, wanted)], [*wanted.values()])
        drafts = {}
        for (seq, k), draft in zip(wanted.items(), found, strict=True):
            if draft and seq.params.structured_outputs is not None:
                draft = self.proposer.resolve(draft)
            if own := self.rules.trim(seq, draft[:k])[num_in_flight(seq) :]:
                drafts[seq.seq_id] = own
                self._by_proposer.add(seq.seq_id)
            else:
                self.policy.observe(seq.seq_id, 0, 0)  # a draft that the grammar rejects counts as no draft
        num_tokens, longest = sum(map(len, drafts.values())), max(wanted.values())
        self.policy.observe_drafting(len(seqs), longest, num_tokens, self._clock() - start)
        return drafts

    def _state(self, seq: Sequence) -> RowState:
        """Return a sequence as the proposer sees it."""
        if seq.seq_id not in self._specs:
            self._specs[seq.seq_id] = sampling_spec(seq)
        return RowState(
            seq.seq_id, seq.tokens(0, seq.num_tokens), seq.num_prompt_tokens, self._specs[seq.seq_id],
            seq.request.cache_salt, num_in_flight(seq),
        )  # fmt: skip

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
            self.policy.forget(seq.seq_id)
            if self._specs.pop(seq.seq_id, None) is not None:
                self.proposer.finish(seq.seq_id)
            if seq.status is not SequenceStatus.FINISHED_ABORTED:
                self.proposer.remember(seq.tokens(seq.num_prompt_tokens, seq.num_tokens), seq.request.cache_salt)


def num_in_flight(seq: Sequence) -> int:
    """Return 1 if the newest token of `seq` has not arrived, else 0."""
    return 1 + seq.num_computed_tokens - seq.num_tokens


def num_left(seq: Sequence) -> int:
    """Return how many tokens may come behind those of `seq` but the last, which is never drafted. A token in flight counts as one."""
    return max(0, seq.max_tokens - seq.num_output_tokens - 1)
