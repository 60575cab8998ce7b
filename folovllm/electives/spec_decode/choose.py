"""What steps with and without draft tokens take, and the draft lengths that give the most tokens a second.

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
HARDLY = 1e-9  # a chance that is never less, since it divides
FAR = 1e6  # tokens of a step: up to there the last slope of a curve holds


class Curve:
    """Seconds of a step by its tokens: `seconds[i]` for `widths[i]` tokens, both ascending."""

    def __init__(self, widths: Sequence[float], seconds: Sequence[float]) -> None:
        slope = np.diff(seconds[-2:]) / np.diff(widths[-2:])  # of one point: none
        self.widths = np.array([*widths, *(slope * 0 + FAR)])
        self.seconds = np.array([*seconds, *(seconds[-1] + slope * (FAR - widths[-1]))])

    def at(self, num_tokens: float | Floats) -> Floats:
        """Return the seconds of steps of `num_tokens`: on the line between two widths, and behind the last on its slope."""
        return np.interp(num_tokens, self.widths, self.seconds)


@dataclass
class StepCost:
    """Seconds of steps, as measured when the engine starts."""

    curve: Curve  # of steps that overlap
    wait: float = 0.0  # how much longer a step takes that verifies draft tokens: the host waits for them
    per_draft_token: float = 0.0  # seconds that the proposer takes for each draft token, of all sequences together
    first_draft_token: float = 0.0  # and for the first one, or to find that it has none, more than that

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
        """Return the average seconds [n] of steps for which the proposer is asked, its own time included.

        Args:
            num_tokens: [n], of such steps, on average.
            depths: [n], draft tokens for the sequence with most.
            hits: [S], the chance of each sequence that there is a draft for it. Where no sequence has one, the step verifies
                nothing; so the others are wider than the average.
        """
        num_seqs, silent = len(hits), float(np.prod(1 - hits))
        some = max(1 - silent, HARDLY)  # the chance that some sequence has a draft
        verifying = self.curve.at(num_seqs + (num_tokens - num_seqs) / some) + self.wait
        drafting = self.first_draft_token + self.per_draft_token * depths
        return silent * self.of_plain(num_seqs) + some * verifying + drafting


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
