"""How many tokens to draft for each request: by an acceptance average, a measured cost curve, and a back-off."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from folovllm.electives.spec_decode.choose import StepCost, best_draft_lengths


class LengthPolicy(ABC):
    """Decides how many tokens to draft, and learns whether it paid. A subclass needs `lengths` alone.

    Attributes:
        most: the most draft tokens for a sequence in a step.
        rest: steps for which the scheduler need not ask again after `lengths` has said 0 for all.
    """

    most = 64
    rest = 0

    @abstractmethod
    def lengths(self, seq_ids: Sequence[int]) -> list[int]:
        """Return how many tokens to draft for each sequence of the coming step.

        Where steps overlap, the newest tokens are not known yet. The engine may draft fewer, where the text or the step's budget
        has no room.
        """

    def pays(self, num_seqs: int, num_tokens: int) -> bool:
        """Return whether to verify so many jump-forward tokens, which a grammar forces, in a step of `num_seqs` sequences."""
        return True

    def observe(self, seq_id: int, num_draft_tokens: int, num_accepted: int) -> None:
        """Record what came of a draft; 0 tokens: the proposer was asked for one and had none."""

    def observe_asked(self, num_seqs: int, longest: int, num_draft_tokens: int, seconds: float) -> None:
        """Record what the proposer took for a step of `num_seqs` sequences when it was asked for at most `longest` tokens each."""

    def observe_steps(self, num_seqs: int, seconds: float, has_drafts: bool) -> None:
        """Record what a step of `num_seqs` sequences took in all: one with drafts, or on average one of several without.

        One with drafts is told of behind all that came of them, and not if a prompt was computed beside them.
        """

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
    """Drafts as many tokens as pay, for each sequence; where drafts have cost time it backs off.

    `best_draft_lengths` decides from the acceptance averages and `cost`; a decision holds for some steps. The policy adds up
    the seconds that drafts cost, less those that accepted tokens save. Where no sequence gets a draft, or `SLACK` was lost, the
    scheduler rests for `BACK_OFF` times the loss: so drafts that do not pay take about 1% of the time, whatever the averages
    say. Behind a rest comes a decision again, with a probe if it has no drafts: a few tokens of one sequence, in turn. Where
    one probe of a model or a head after the other is rejected, each rest is twice as long as the last, up to `PATIENCE` doublings.

    A rest is also when plain steps are timed. What accepted tokens save is counted in these, so a short rest comes before the
    first drafts of each size of batch, and again after `TIMED_EACH` decisions.
    """

    KEEP = 0.9  # decay of an observation in a step
    OF_NEW = 2.0  # weight of the average of all, in steps, where a sequence begins
    MARGIN = 1.1  # the least gain for which anything is drafted
    HOLD = 4  # steps that a decision holds
    PROBE = 4  # draft tokens of a probe
    PROBE_EACH = 16  # decisions from one probe to the next while other sequences have drafts
    TIMED_EACH = 128  # decisions until plain steps are timed again
    BACK_OFF = 100
    PATIENCE = 3
    ODD = 8  # times what was expected: a step that took longer was held up by something else
    SHORTEST, LONGEST = 8, 1 << 14  # steps of a rest
    SLACK = 8  # plain steps: so much may be lost before a rest, and of what was won so much is kept for that

    def __init__(self, cost: StepCost, most: int, first: Acceptance = UNKNOWN) -> None:
        """`most`: draft tokens for a sequence in a step. `first`: the averages to begin with, `TRUSTED` for a draft model."""
        self.cost, self.most, self.rest = cost, most, 0
        self._is_lookup = first is UNKNOWN  # what a draft model takes was measured, and a lookup's time is averaged
        self._common = replace(first)
        self._by_seq: dict[int, Acceptance] = {}  # by seq_id
        self._decided: dict[int, int] = {}  # by seq_id
        self._hold = 0  # steps that the decision still holds
        self._lost = 0.0  # seconds that drafts have cost; below zero they have won some
        self._won_by_token = 0.0  # seconds, for each draft token of the coming step that is accepted
        self._expected = 0.0  # seconds of the coming step, if it has drafts
        self._plain_over_curve: dict[
            int, float
        ] = {}  # what plain steps took by what the curve says, by bits of their sequences
        self._timed_until: dict[int, int] = {}  # by the same bits: the decision from which on they are timed again
        self._num_decisions = 0
        self._in_vain = 0  # rests in a row before which time was lost, by no lookup

    def lengths(self, seq_ids: Sequence[int]) -> list[int]:
        """Return the lengths of the decision that holds, or of a new one."""
        self._hold -= 1
        is_in_debt = self._lost > self.SLACK * self._plain(len(seq_ids))
        if self._hold >= 0 and not is_in_debt and self._decided.keys() >= set(seq_ids):
            return [self._decided[seq_id] for seq_id in seq_ids]
        hits, rates = np.array([(own.hit, own.rate) for own in map(self.acceptance, seq_ids)]).T
        lengths = best_draft_lengths(hits, rates, self.cost, self.most, self.MARGIN)
        self._hold, self._num_decisions, has_rested = self.HOLD - 1, self._num_decisions + 1, self.rest > 0
        is_untimed = self._num_decisions > self._timed_until.get(len(seq_ids).bit_length(), 0)
        if not has_rested and (is_in_debt or is_untimed or not any(lengths)):
            lengths = [0] * len(seq_ids)
            self._rest(len(seq_ids))
        else:
            self.rest = 0
            if not any(lengths) or self._num_decisions % self.PROBE_EACH == 0:
                self._probe(lengths)
        self._decided = dict(zip(seq_ids, lengths, strict=True))
        return lengths

    def _rest(self, num_seqs: int) -> None:
        """Set how long to back off, by what was lost."""
        self._timed_until[num_seqs.bit_length()] = self._num_decisions + self.TIMED_EACH
        steps, self._hold = self.BACK_OFF * self._lost / self._plain(num_seqs), 0
        steps *= 1 << min(self._in_vain, self.PATIENCE)
        self._in_vain = self._in_vain + 1 if self._lost > 0 and not self._is_lookup else 0
        self.rest, self._lost = int(max(self.SHORTEST, min(steps, self.LONGEST))), min(self._lost, 0.0)

    def _probe(self, lengths: list[int]) -> None:
        """Add to `lengths` a few tokens for one of the sequences that get none, in turn. The decision holds for one step."""
        if idle := [i for i, length in enumerate(lengths) if not length]:
            lengths[idle[self._num_decisions % len(idle)]] = min(self.PROBE, self.most)
            self._hold = 0

    def acceptance(self, seq_id: int) -> Acceptance:
        """Return the averages of a sequence; for a new one those of all sequences."""
        return self._by_seq.get(seq_id, self._common)

    def pays(self, num_seqs: int, num_tokens: int) -> bool:
        """Return whether the step then costs less a token. All these tokens are accepted, so only costs are compared."""
        width, cost = num_seqs + num_tokens, self.cost
        return width * cost.of_plain(num_seqs) > self.MARGIN * num_seqs * cost.of_verifying(width)

    def observe(self, seq_id: int, num_draft_tokens: int, num_accepted: int) -> None:
        """Update the averages of the sequence and of all, and count what accepted tokens have won."""
        own = self._by_seq.setdefault(seq_id, self._common.of_new(self.OF_NEW))
        for acceptance in (own, self._common):
            acceptance.update(num_draft_tokens, num_accepted, self.KEEP)
        self._lost -= self._won_by_token * num_accepted

    def observe_asked(self, num_seqs: int, longest: int, num_draft_tokens: int, seconds: float) -> None:
        """Count what the step is expected to take more than a plain one. Of what was won, `SLACK` plain steps count at most."""
        plain = self._plain(num_seqs)
        if self._is_lookup:  # one that reads a long text first says little of others
            self.cost.first_draft_token += 0.1 * (min(seconds, plain) - self.cost.first_draft_token)
        else:
            seconds = max(seconds, self.cost.of_drafting(longest))
        verifying = self.cost.of_verifying(num_seqs + num_draft_tokens) - self.cost.of_plain(num_seqs)
        more = seconds + (verifying if num_draft_tokens else 0.0)
        self._lost = max(self._lost, -self.SLACK * plain) + more
        self._won_by_token, self._expected = plain / num_seqs, plain + more

    def observe_steps(self, num_seqs: int, seconds: float, has_drafts: bool) -> None:
        """Count for a step with drafts what it took, in place of what was expected: the host's work for it was not timed before."""
        if has_drafts:
            self._lost += min(seconds, self.ODD * self._expected) - self._expected
        else:
            self._plain_over_curve[num_seqs.bit_length()] = seconds / self.cost.of_plain(num_seqs)

    def _plain(self, num_seqs: int) -> float:
        """Return the seconds of a plain step, as far as such steps were timed."""
        return self.cost.of_plain(num_seqs) * self._plain_over_curve.get(num_seqs.bit_length(), 1.0)

    def forget(self, seq_id: int) -> None:
        self._by_seq.pop(seq_id, None)
