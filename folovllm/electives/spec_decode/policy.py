"""Decides how many tokens to draft for each sequence: by average acceptance, measured costs, and a back-off."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from folovllm.electives.spec_decode.choose import StepCost, best_draft_lengths


class LengthPolicy(ABC):
    """Decides how many tokens to draft, and is told what came of the drafts. A subclass needs `lengths` alone.

    Attributes:
        most: the most draft tokens for a sequence in a step.
        rest: after `lengths` returned 0 for all, the number of steps for which it need not be called.
    """

    most = 64
    rest = 0

    @abstractmethod
    def lengths(self, seq_ids: Sequence[int]) -> list[int]:
        """Return how many tokens to draft for each sequence of the coming step.

        The engine may draft fewer, where the text or the step's budget has no room.
        """

    def pays(self, num_seqs: int, num_tokens: int) -> bool:
        """Return whether a step of `num_seqs` sequences should verify `num_tokens` more, which grammars force (jump-forward)."""
        return True

    def observe(self, seq_id: int, num_draft_tokens: int, num_accepted: int) -> None:
        """Record what came of a draft. `num_draft_tokens` is 0 if the proposer had no draft."""

    def observe_drafting(self, num_seqs: int, longest: int, num_draft_tokens: int, seconds: float) -> None:
        """Record the proposer's seconds for a step of `num_seqs` sequences, each with a draft of at most `longest` tokens."""

    def observe_steps(self, num_seqs: int, seconds: float, num_plain: int, has_drafts: bool) -> None:
        """Record the seconds of `num_plain` steps of `num_seqs` sequences and, if it has drafts, of one more behind them.

        Called after `observe` for all drafts of the step.
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
    misses: float  # steps in which it was asked and had none
    accepted: float  # draft tokens that were accepted
    rejected: float  # draft tokens that were the first to be rejected in a step

    @property
    def hit(self) -> float:
        """Return the chance that the proposer has a draft."""
        return self.drafts / (self.drafts + self.misses)

    @property
    def rate(self) -> float:
        """Return the chance that a draft token is accepted if those before it were."""
        return self.accepted / (self.accepted + self.rejected)

    def update(self, num_draft_tokens: int, num_accepted: int, keep: float) -> None:
        """Add a step. The weight of each earlier step is multiplied by `keep`."""
        self.drafts = keep * self.drafts + (num_draft_tokens > 0)
        self.misses = keep * self.misses + (num_draft_tokens == 0)
        if num_draft_tokens:
            self.accepted = keep * self.accepted + num_accepted
            self.rejected = keep * self.rejected + (num_accepted < num_draft_tokens)

    def of_new(self, weight: float) -> Acceptance:
        """Return the same averages with the weight of `weight` steps: where a new sequence begins."""
        hit, rate = self.hit, self.rate
        return Acceptance(weight * hit, weight * (1 - hit), weight * rate, weight * (1 - rate))


UNKNOWN = Acceptance(0.0, 1.0, 0.5, 0.5)  # where a lookup begins
TRUSTED = Acceptance(8.0, 0.0, 7.6, 0.4)  # where a draft model or a head begins


class AdaptiveLength(LengthPolicy):
    """Drafts as many tokens as pay, for each sequence; where drafts have cost time it backs off.

    `best_draft_lengths` decides from the acceptance averages and `cost`, which was measured at the start; a decision holds for some
    steps. The policy adds up the seconds that drafts cost, less those that accepted tokens save: the loss. If no sequence gets a
    draft, or the loss exceeds `SLACK`, there are no drafts for `BACK_OFF` times the loss (a *rest*). So drafts that do not pay
    take about 0.5% of the time, even if the averages are wrong. After a rest it decides again. If that gives no drafts, one sequence
    gets a few, as a probe.

    Plain steps are timed in rests, and accepted tokens save plain steps. So a short rest comes before the first drafts of each
    size of batch, and again after `TIMED_EACH` decisions.
    """

    KEEP = 0.9  # decay of an observation in a step
    OF_NEW = 2.0  # weight of the average of all, in steps, where a sequence begins
    MARGIN = 1.1  # drafts must give this many times the tokens a second
    HOLD = 4  # steps that a decision holds
    PROBE = 4  # draft tokens of a probe
    PROBE_EACH = 16  # decisions from one probe to the next while other sequences have drafts
    TIMED_EACH = 128  # decisions until plain steps are timed again
    BACK_OFF = 200
    OUTLIER = 8  # times the expected seconds: the rest of a longer step had another cause
    SHORTEST, LONGEST = 8, 1 << 14  # steps of a rest
    SLACK = 8  # plain steps: the loss that leads to a rest, and the most that is kept of a gain

    def __init__(self, cost: StepCost, most: int, first: Acceptance = UNKNOWN) -> None:
        """`most`: draft tokens for a sequence in a step. `first`: `UNKNOWN` for a lookup, `TRUSTED` for a draft model or a head."""
        self.cost, self.most, self.rest = cost, most, 0
        self._common = replace(first)
        self._by_seq: dict[int, Acceptance] = {}  # by seq_id
        self._decided: dict[int, int] = {}  # by seq_id
        self._hold = self._num_decisions = 0  # steps that the decision still holds
        self._lost = 0.0  # seconds; negative: a gain
        self._saved_by_token = 0.0  # seconds that an accepted token of the coming step saves
        self._expected = 0.0  # seconds of the coming step, if it has drafts
        self._plain_factor: dict[int, float] = {}  # seconds of plain steps over the curve's, by `num_seqs.bit_length()`

    def lengths(self, seq_ids: Sequence[int]) -> list[int]:
        """Return the lengths of the last decision while it holds, else decide anew."""
        self._hold -= 1
        plain, has_rested = self._plain(len(seq_ids)), self.rest > 0
        is_over_slack = self._lost > self.SLACK * plain
        if self._hold >= 0 and not is_over_slack and self._decided.keys() >= set(seq_ids):
            return [self._decided[seq_id] for seq_id in seq_ids]
        hits, rates = np.array([(own.hit, own.rate) for own in map(self.acceptance, seq_ids)]).T
        lengths = best_draft_lengths(hits, rates, self.cost, self.most, self.MARGIN)
        self._hold, self._num_decisions, self.rest = self.HOLD - 1, self._num_decisions + 1, 0
        is_untimed = len(seq_ids).bit_length() not in self._plain_factor or self._num_decisions % self.TIMED_EACH == 0
        if not has_rested and (is_over_slack or is_untimed or not any(lengths)):
            lengths, self._hold = [0] * len(seq_ids), 0
            self.rest = int(max(self.SHORTEST, min(self.BACK_OFF * self._lost / plain, self.LONGEST)))
            self._lost = min(self._lost, 0.0)
        elif not any(lengths) or self._num_decisions % self.PROBE_EACH == 0:
            self._probe(lengths)
        self._decided = dict(zip(seq_ids, lengths, strict=True))
        return lengths

    def _probe(self, lengths: list[int]) -> None:
        """Give a few tokens to one sequence that has none in `lengths`, each time another. The decision holds for one step."""
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
        """Update the averages of the sequence and of all, and subtract from the loss what accepted tokens save."""
        own = self._by_seq.setdefault(seq_id, self._common.of_new(self.OF_NEW))
        for acceptance in (own, self._common):
            acceptance.update(num_draft_tokens, num_accepted, self.KEEP)
        self._lost -= self._saved_by_token * num_accepted

    def observe_drafting(self, num_seqs: int, longest: int, num_draft_tokens: int, seconds: float) -> None:
        """Add to the loss what the step should take more than a plain one. A gain counts `SLACK` plain steps at most."""
        plain, cost = self._plain(num_seqs), self.cost
        verifying = (
            cost.of_verifying(num_seqs + num_draft_tokens) - cost.of_plain(num_seqs) if num_draft_tokens else 0.0
        )
        more = max(seconds, cost.of_drafting(longest)) + verifying
        self._lost = max(self._lost, -self.SLACK * plain) + more
        self._saved_by_token, self._expected = plain / num_seqs, plain + more

    def observe_steps(self, num_seqs: int, seconds: float, num_plain: int, has_drafts: bool) -> None:
        """Correct the loss by what a step with drafts really took, the host's work included; or note what plain steps take."""
        if has_drafts:
            seconds -= num_plain * self._plain(num_seqs)
            self._lost += min(seconds, self.OUTLIER * self._expected) - self._expected
        elif num_plain:
            self._plain_factor[num_seqs.bit_length()] = seconds / num_plain / self.cost.of_plain(num_seqs)

    def _plain(self, num_seqs: int) -> float:
        """Return the seconds of a plain step: the curve's, corrected by timed steps."""
        return self.cost.of_plain(num_seqs) * self._plain_factor.get(num_seqs.bit_length(), 1.0)

    def forget(self, seq_id: int) -> None:
        self._by_seq.pop(seq_id, None)
