"""The cost of steps with and without draft tokens, and the draft lengths that give the most tokens a second.

A step over one sequence and k draft tokens gives 1 + a + a^2 + ... + a^k tokens, if each draft token is accepted with
probability a where all before it were (Leviathan et al., arXiv 2211.17192, section 3.1). It takes longer than a plain step.
So the ratio of tokens to seconds decides, over the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
MIN_CHANCE = 1e-9  # so that no division is by zero
MAX_WIDTH = 1e6  # tokens of a step: the last slope of a curve goes on to there


class Curve:
    """Seconds of a step by its tokens: `seconds[i]` for `widths[i]` tokens, both ascending."""

    def __init__(self, widths: Sequence[float], seconds: Sequence[float]) -> None:
        slope = np.diff(seconds[-2:]) / np.diff(widths[-2:])  # empty for a single point
        self.widths = np.array([*widths, *(slope * 0 + MAX_WIDTH)])
        self.seconds = np.array([*seconds, *(seconds[-1] + slope * (MAX_WIDTH - widths[-1]))])

    def at(self, num_tokens: float | Floats) -> Floats:
        """Return the seconds of steps of `num_tokens`: straight lines join the points, and the last one goes on."""
        return np.interp(num_tokens, self.widths, self.seconds)


@dataclass
class StepCost:
    """Seconds of steps, as measured when the engine starts."""

    curve: Curve  # of steps that overlap, by their tokens
    wait: float = 0.0  # what a step that verifies takes more, since the host waits for its tokens
    per_draft_token: float = 0.0  # the proposer's seconds for one more draft token in every sequence
    first_draft_token: float = 0.0  # and its fixed seconds each time it is asked, even if it has no draft

    def of_plain(self, num_tokens: float) -> float:
        """Return the seconds of a step without draft tokens."""
        return float(self.curve.at(num_tokens))

    def of_verifying(self, num_tokens: float) -> float:
        """Return the seconds of a step that verifies draft tokens, with `num_tokens` in all."""
        return float(self.curve.at(num_tokens)) + self.wait

    def of_drafting(self, length: int) -> float:
        """Return the proposer's seconds for a step whose longest draft has `length` tokens."""
        return self.first_draft_token + self.per_draft_token * length

    def of_speculative(self, num_tokens: Floats, depths: npt.NDArray[np.integer], hits: Floats) -> Floats:
        """Return the average seconds [n] of steps for which the proposer is asked, the proposer's time included.

        Args:
            num_tokens: [n], the tokens of such a step, on average.
            depths: [n], the draft tokens of the sequence that gets most.
            hits: [S], the chance of each sequence that the proposer has a draft for it. A step for which it has none verifies
                nothing; so the steps that verify have more tokens than the average.
        """
        num_seqs, no_draft = len(hits), float(np.prod(1 - hits))
        some = max(1 - no_draft, MIN_CHANCE)  # the chance that some sequence has a draft
        verifying = self.curve.at(num_seqs + (num_tokens - num_seqs) / some) + self.wait
        drafting = self.first_draft_token + self.per_draft_token * depths
        return no_draft * self.of_plain(num_seqs) + some * verifying + drafting


def best_draft_lengths(hits: Floats, acceptances: Floats, cost: StepCost, most: int, margin: float = 1.0) -> list[int]:
    """Return the number of draft tokens for each sequence [S], 0 to `most`, that gives the most tokens a second.

    The j-th draft token of a sequence comes with the chance `hit`, takes one token of the step's width, and is worth
    acceptance ** j. So sort all draft tokens of all sequences by worth, and take as many from the front as give the best ratio
    of tokens to time: for any width no other choice has more tokens. All zero unless that is more than `margin` times as
    good as to draft nothing. `cost.of_speculative` gives the time of each width, `cost.of_plain` that of a step without draft tokens.
    """
    num_seqs = len(hits)
    worth = acceptances[:, None] ** np.arange(1, most + 1)  # [S, most]
    order = np.argsort(-worth, axis=None, kind="stable")
    seq, depth = order // most, order % most + 1
    tokens = num_seqs + np.cumsum(hits[seq] * worth.ravel()[order])
    width = num_seqs + np.cumsum(hits[seq])
    speed = tokens / cost.of_speculative(width, np.maximum.accumulate(depth), hits)
    best = int(np.argmax(speed))
    if speed[best] <= margin * num_seqs / cost.of_plain(num_seqs):
        return [0] * num_seqs
    return np.bincount(seq[: best + 1], minlength=num_seqs).tolist()
