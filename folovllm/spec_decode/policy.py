"""How many tokens to draft for each request: by an acceptance average, a measured cost curve, and a back-off."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from folovllm.spec_decode.choose import StepCost, best_draft_lengths


class TimedSteps(NamedTuple):
    """The time of a step, or of several plain ones of the same sequences."""

    seconds: float  # of all of them, the proposer's included
    num_steps: int
    num_seqs: int
    num_draft_tokens: int
    num_accepted: int
    length: int  # the longest draft that the proposer was asked for; 0: it was not asked
    proposing: float  # of the seconds, the proposer's on the host
    is_typical: bool  # the proposer had no long text to observe first


class LengthPolicy(ABC):
    """Decides how many tokens to draft, and learns whether it paid. A subclass needs `lengths` alone.

    Attributes:
        most: the most draft tokens for a sequence in a step.
        rest: steps for which the scheduler need not ask again after `lengths` has said 0 for all.
        may_wake: whether a new sequence may shorten a rest.
    """

    most = 64
    rest = 0
    may_wake = True

    @abstractmethod
    def lengths(self, seq_ids: Sequence[int]) -> list[int]:
        """Return how many tokens to draft for each sequence of the coming step.

        Where steps overlap, the newest tokens are not known yet. The engine may draft fewer, where the text or the step's budget
        has no room.
        """

    def pays(self, num_seqs: int, num_tokens: int) -> bool:
        """Return whether to verify so many jump-forward tokens, which a grammar forces, in a step of `num_seqs` sequences."""
        return True

    def constrain(self, seq_id: int) -> None:
        """Record that a grammar constrains a sequence. It may be called again."""

    def observe(self, seq_id: int, num_draft_tokens: int, num_accepted: int) -> None:
        """Record what came of a draft; 0 tokens: the proposer was asked for one and had none."""

    def observe_steps(self, steps: TimedSteps) -> None:
        """Record what steps took."""

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence that has ended."""


class FixedLength(LengthPolicy):
    """The same number for all sequences, in each step."""

    def __init__(self, k: int) -> None:
        self.most = k

    def lengths(self, seq_ids: Sequence[int]) -> list[int]:
        return [self.most] * len(seq_ids)


@dataclass
class Acceptance:
    """Running averages of what came of drafts. Old observations fade, so that they follow the text."""

    drafts: float  # steps in which the proposer had a draft
    silent: float  # steps in which it was asked and had none
    accepted: float  # draft tokens that were accepted
    rejected: float  # draft tokens that were the first to be rejected in a step

    @property
    def hit(self) -> float:
        """Return the chance that the proposer has a draft."""
        return self.drafts / (self.drafts + self.silent)

    @property
    def rate(self) -> float:
        """Return the chance that a draft token is accepted if those before it were."""
        return self.accepted / (self.accepted + self.rejected)

    def update(self, num_draft_tokens: int, num_accepted: int, keep: float) -> None:
        """Add a step. Earlier steps count `keep` times as much as until now."""
        self.drafts = keep * self.drafts + (num_draft_tokens > 0)
        self.silent = keep * self.silent + (num_draft_tokens == 0)
        if num_draft_tokens:
            self.accepted = keep * self.accepted + num_accepted
            self.rejected = keep * self.rejected + (num_accepted < num_draft_tokens)

    def of_new(self, weight: float) -> Acceptance:
        """Return the same averages with the weight of `weight` steps, for a new sequence to begin with."""
        hit, rate = self.hit, self.rate
        return Acceptance(weight * hit, weight * (1 - hit), weight * rate, weight * (1 - rate))


UNKNOWN = Acceptance(0.0, 1.0, 0.5, 0.5)  # of a proposer that has had no draft yet
TRUSTED = Acceptance(8.0, 0.0, 7.6, 0.4)  # of a draft model that was not asked yet


class AdaptiveLength(LengthPolicy):
    """Drafts as many tokens as pay, for each sequence; none where none pay, and then it backs off.

    `best_draft_lengths` decides from the acceptance averages and `cost`; a decision holds for some steps. A sequence that gets no
    draft is probed now and then: the proposer is asked for a few tokens, for one sequence in turn. The interval between probes
    starts at `SHORTEST` and grows `GROWTH`-fold with each probe; a probe that is accepted as a whole resets it. While other
    sequences have drafts, it is `LONGEST` at most. While no sequence has one, the scheduler rests between probes, and a rest
    above `LONGEST` ends when what was lost on drafts is `SHARE` of the time.
    """

    KEEP, KEEP_COMMON = 0.9, 0.99  # decay of an observation in a step: in its sequence's average, in that of all
    OF_NEW = 2.0  # weight of the average of all, in steps, where a sequence begins
    MARGIN = 1.02  # the least gain for which anything is drafted
    HOLD = 8  # steps that a decision holds
    FIRST = 3  # the same if some sequence is new
    SHORTEST, GROWTH, LONGEST = 8, 4, 64  # steps from one probe to the next: 8, then 32, ...
    PROBE = 4  # draft tokens of a probe
    SHARE = 0.005  # the fraction of the time that may be lost on drafts
    SAVED = 16  # plain steps: of the time that drafts have won, this much may be lost again before a long rest
    AT_MOST = 1 << 14  # steps of a rest
    FEW = 4  # new sequences that get drafts at once; one more for each sequence that has averages

    def __init__(self, cost: StepCost, most: int, first: Acceptance = UNKNOWN) -> None:
        """`most`: draft tokens for a sequence in a step. `first`: the averages to begin with, `TRUSTED` for a draft model."""
        self.cost, self.most = cost, most
        self._common = {False: replace(first), True: replace(UNKNOWN)}  # by whether a grammar constrains a sequence
        self._own: dict[int, Acceptance] = {}  # by seq_id
        self._constrained: set[int] = set()  # by seq_id
        # A draft model reads all new texts in one step, other proposers one after the other.
        self._reads_each = first is UNKNOWN
        self._decided: dict[int, int] = {}  # by seq_id
        self._hold = 0  # steps that the decision still holds
        self._pause = self._until_probe = self.SHORTEST
        self._has_rested: bool | None = None  # whether the last decision was to rest; None: there was none
        self._lost = 0.0  # seconds
        self._num_probes, self._probed = 0, -1  # so far; the last one's seq_id

    def lengths(self, seq_ids: Sequence[int]) -> list[int]:
        """Return the lengths of the decision that holds, or of a new one."""
        self._hold -= 1
        if self._hold >= 0 and self._decided.keys() >= set(seq_ids):
            return [self._decided[seq_id] for seq_id in seq_ids]
        hits, rates = np.array([(own.hit, own.rate) for own in map(self.acceptance, seq_ids)]).T
        lengths = best_draft_lengths(hits, rates, self.cost, self.most, self.MARGIN)
        if self._reads_each:
            new = [i for i, seq_id in enumerate(seq_ids) if lengths[i] and seq_id not in self._own]
            for i in new[self.FEW + len(self._own) :]:
                lengths[i] = 0
        pays, self.rest = any(lengths), 0
        self._hold = pays * (self.HOLD if self._own.keys() >= set(seq_ids) else self.FIRST) - 1
        self._decided = dict(zip(seq_ids, lengths, strict=True))
        if self._has_rested is None or not (self._has_rested or pays):  # in the first rest plain steps are timed
            self._hold = -1
            self._rest(len(seq_ids))
            return [0] * len(seq_ids)
        self._has_rested = False
        self._until_probe -= self._hold + 1
        if 0 in lengths and (not pays or self._until_probe <= 0):
            self._probe(seq_ids, lengths)
        return lengths

    def _rest(self, num_seqs: int) -> None:
        """Set how long to back off: until the next probe is due, but above `LONGEST` no longer than what was lost requires.

        What was lost beyond `SAVED` plain steps is always brought down to a small part of the time.
        """
        self._has_rested, self.may_wake = True, self._lost <= 0.0
        lost = self._lost / self.cost.of_plain(num_seqs)  # in steps
        rest = max(min(self._pause, max(self.LONGEST, lost / self.SHARE)), (lost - self.SAVED) / self.SHARE)
        self.rest, self._lost = int(min(rest, self.AT_MOST)), min(self._lost, 0.0)

    def _probe(self, seq_ids: Sequence[int], lengths: list[int]) -> None:
        """Add to `lengths` a few tokens for one of the sequences that get none, in turn."""
        idle = [i for i, length in enumerate(lengths) if not length]
        place = idle[self._num_probes % len(idle)]
        lengths[place], self._probed = min(self.PROBE, self.most), seq_ids[place]
        self._num_probes += 1
        self._until_probe = min(self._pause, self.LONGEST)
        self._pause = min(self.GROWTH * self._pause, self.AT_MOST)

    def acceptance(self, seq_id: int) -> Acceptance:
        """Return the averages of a sequence; for a new one those of all sequences that have a grammar, or have none, as it does."""
        return self._own.get(seq_id) or self._common[seq_id in self._constrained]

    def pays(self, num_seqs: int, num_tokens: int) -> bool:
        """Compare costs alone: these tokens are accepted for certain."""
        width, cost = num_seqs + num_tokens, self.cost
        return width * cost.of_plain(num_seqs) > self.MARGIN * num_seqs * cost.of_verifying(width)

    def constrain(self, seq_id: int) -> None:
        """Keep the averages of such sequences apart, since most proposers know no grammars."""
        self._constrained.add(seq_id)

    def observe(self, seq_id: int, num_draft_tokens: int, num_accepted: int) -> None:
        """Update the averages of the sequence and of all. A probe that was accepted as a whole ends the back-off."""
        common = self._common[seq_id in self._constrained]
        if seq_id not in self._own:
            self._own[seq_id] = common.of_new(self.OF_NEW)
        self._own[seq_id].update(num_draft_tokens, num_accepted, self.KEEP)
        common.update(num_draft_tokens, num_accepted, self.KEEP_COMMON)
        if seq_id == self._probed and 0 < num_draft_tokens == num_accepted:
            self._pause = self._until_probe = self.SHORTEST

    def observe_steps(self, steps: TimedSteps) -> None:
        """Correct the cost, and add up the time lost or won against plain steps that sample as many tokens."""
        n, k, cost = steps.num_seqs, steps.num_draft_tokens, self.cost
        if not (steps.length or k):
            is_rest = steps.num_steps > 1
            cost.record_plain(n, (steps.seconds - is_rest * steps.proposing) / steps.num_steps, 0.3 if is_rest else 0.1)
            self._lost += is_rest * steps.proposing  # what the decision to rest took
            return
        drafting = cost.first_draft_token + cost.per_draft_token * steps.length if steps.length else 0.0
        expected = drafting + (cost.of_verifying(n + k) if k else cost.of_no_draft(n))
        if steps.is_typical and k:
            cost.record_verifying(n, k, steps.seconds - drafting)
        elif steps.is_typical:
            cost.record_no_draft(n, steps.seconds - drafting)
        if steps.length:
            plain = cost.of_plain(n)
            spent = steps.proposing + min(steps.seconds - steps.proposing, 2 * expected)
            self._lost += spent - plain * (1 + steps.num_accepted / n)
            if self._lost < -self.SAVED * plain:
                self._lost, self._pause = -self.SAVED * plain, min(self._pause, self.LONGEST)

    def forget(self, seq_id: int) -> None:
        self._own.pop(seq_id, None)
        self._constrained.discard(seq_id)
