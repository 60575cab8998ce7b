"""Decides how many tokens to draft for each sequence: by average acceptance, a curve of cost, and a back-off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from folovllm.electives.spec_decode.choose import StepCost, best_draft_lengths

KEEP = 0.9  # weight of an average as it was, beside a new observation


class LengthPolicy:
    """Drafts `most` tokens for each sequence, in every step. A subclass decides otherwise, and is told what came of the drafts.

    Attributes:
        most: the most draft tokens for a sequence in a step.
        rest: after `lengths` returned 0 for all, the number of steps for which it need not be called.
    """

    rest = 0

    def __init__(self, most: int) -> None:
        self.most = most

    def lengths(self, seq_ids: Sequence[int]) -> list[int]:
        """Return how many tokens to draft for each sequence of the coming step.

        The engine may draft fewer, where the text or the step's budget has no room.
        """
        return [self.most] * len(seq_ids)

    def pays(self, num_seqs: int, num_tokens: int) -> bool:
        """Return whether a step of `num_seqs` sequences should verify `num_tokens` more, which grammars force (jump-forward)."""
        return True

    def observe(self, seq_id: int, num_draft_tokens: int, num_accepted: int) -> None:
        """Record what came of a draft. `num_draft_tokens` is 0 if the proposer had no draft."""

    def observe_drafting(self, num_seqs: int, longest: int, num_draft_tokens: int, seconds: float) -> None:
        """Record the proposer's seconds for a step of `num_seqs` sequences, each with a draft of at most `longest` tokens."""

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence that has ended."""


@dataclass
class Acceptance:
    """Averages of what came of drafts. Old observations fade, so that they follow the text.

    Attributes:
        hit: the chance that the proposer has a draft.
        rate: the chance that a draft token is accepted if those before it were.
    """

    hit: float
    rate: float

    def update(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Add a step: one observation of `hit`, and one of `rate` for each accepted token and for the first rejected one."""
        self.hit = KEEP * self.hit + (1 - KEEP) * (num_draft_tokens > 0)
        self.rate = 1 - KEEP**num_accepted * (1 - self.rate)
        if num_accepted < num_draft_tokens:
            self.rate *= KEEP


UNKNOWN = Acceptance(0.0, 0.5)  # where a lookup begins
TRUSTED = Acceptance(1.0, 0.95)  # where a draft model or a head begins


class AdaptiveLength(LengthPolicy):
    """Drafts as many tokens as pay, for each sequence; where drafts have cost time it backs off.

    `best_draft_lengths` decides from the averages and from `cost`; a decision holds for some steps. The policy adds up the
    seconds that drafts cost, less those that accepted tokens save: the loss. If no sequence gets a draft, or the loss exceeds
    `SLACK`, there are no drafts for `back_off` times the loss (a *rest*). So with 100, drafts that do not pay take about 1% of the
    time, even if the averages are wrong. After a rest it decides again. If that gives no drafts, one sequence gets a few, as a probe.
    """

    MARGIN = 1.1  # drafts must give this many times the tokens a second
    HOLD = 4  # steps that a decision holds
    PROBE = 4  # draft tokens of a probe
    PROBE_EACH = 16  # decisions from one probe to the next while other sequences have drafts
    SHORTEST, LONGEST = 8, 1 << 14  # steps of a rest
    SLACK = 8  # plain steps: the loss that leads to a rest, and the most that is kept of a gain

    def __init__(self, cost: StepCost, most: int, first: Acceptance = UNKNOWN, back_off: int = 100) -> None:
        """`first`: `UNKNOWN` for a lookup, `TRUSTED` for a draft model or a head.

        `back_off`: a rest takes so many times as long as the loss before it.
        """
        super().__init__(most)
        self.cost, self._back_off = cost, back_off
        self._common = replace(first)  # the average of all sequences, with which a new one begins
        self._by_seq: dict[int, Acceptance] = {}  # by seq_id
        self._decided: dict[int, int] = {}  # by seq_id
        self._hold = 0  # steps that the decision still holds
        self._num_decisions = 0
        self._lost = 0.0  # seconds; negative: a gain
        self._saved_by_token = 0.0  # seconds that an accepted token of the coming step saves

    def lengths(self, seq_ids: Sequence[int]) -> list[int]:
        """Return the lengths of the last decision while it holds, else decide anew."""
        self._hold -= 1
        plain = self.cost.of_plain(len(seq_ids))
        is_over_slack = self._lost > self.SLACK * plain
        if self._hold >= 0 and not is_over_slack and self._decided.keys() >= set(seq_ids):
            return [self._decided[seq_id] for seq_id in seq_ids]
        averages = [self._by_seq.get(seq_id, self._common) for seq_id in seq_ids]
        hits, rates = np.array([(own.hit, own.rate) for own in averages]).T
        lengths = best_draft_lengths(hits, rates, self.cost, self.most, self.MARGIN)
        self._hold, self._num_decisions = self.HOLD - 1, self._num_decisions + 1
        has_rested, self.rest = self.rest > 0, 0
        if not has_rested and (is_over_slack or not any(lengths)):
            lengths, self._hold = [0] * len(seq_ids), 0
            self.rest = int(np.clip(self._back_off * self._lost / plain, self.SHORTEST, self.LONGEST))
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

    def pays(self, num_seqs: int, num_tokens: int) -> bool:
        """Return whether the step then costs less a token. All these tokens are accepted, so only costs are compared."""
        width, cost = num_seqs + num_tokens, self.cost
        return width * cost.of_plain(num_seqs) > self.MARGIN * num_seqs * cost.of_verifying(width)

    def observe(self, seq_id: int, num_draft_tokens: int, num_accepted: int) -> None:
        """Update the averages of the sequence and of all, and subtract from the loss what accepted tokens save."""
        own = self._by_seq.setdefault(seq_id, replace(self._common))
        for average in (own, self._common):
            average.update(num_draft_tokens, num_accepted)
        self._lost -= self._saved_by_token * num_accepted

    def observe_drafting(self, num_seqs: int, longest: int, num_draft_tokens: int, seconds: float) -> None:
        """Add to the loss what the step takes more than a plain one. A gain counts `SLACK` plain steps at most."""
        plain = self.cost.of_plain(num_seqs)
        verifying = self.cost.of_verifying(num_seqs + num_draft_tokens) - plain if num_draft_tokens else 0.0
        drafting = max(seconds, self.cost.of_drafting(longest))  # on a device, the host does not see it all
        self._lost = max(self._lost, -self.SLACK * plain) + drafting + verifying
        self._saved_by_token = plain / num_seqs

    def forget(self, seq_id: int) -> None:
        self._by_seq.pop(seq_id, None)
