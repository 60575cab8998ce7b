"""How many tokens to guess, so that speculation never loses: by what was accepted and by what a step costs.

A step over one sequence and k guesses gives 1 + a + a^2 + ... + a^k tokens, if each guess is right with probability a where
all before it were (Leviathan et al., arXiv 2211.17192, section 3.1). It costs more than a step without guesses. Where the
proposer has no idea, a step that was to have guesses costs little more than a plain one. What counts is the ratio of tokens
to seconds, over the whole batch.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
NEWS, RARE_NEWS = 0.1, 0.3  # what one measurement counts against all before it
LEAST = 0.1  # of the table
FADE = 0.03  # of what is missing in the table: what a rest takes off
HARDLY = 1e-9  # a chance that is none


class Curve(NamedTuple):
    """Seconds of a step by its tokens, as measured: `seconds[i]` for `widths[i]` tokens, both ascending."""

    widths: tuple[float, ...]
    seconds: tuple[float, ...]

    def of(self, num_tokens: Floats) -> Floats:
        """[n] tokens -> [n] seconds: between two measured widths on the line, behind the last on its slope."""
        found = np.interp(num_tokens, self.widths, self.seconds)
        if len(self.widths) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.widths[-1] - self.widths[-2])
            found += np.maximum(0.0, num_tokens - self.widths[-1]) * max(0.0, slope)
        return found

    def at(self, num_tokens: float) -> float:
        """`of` a single number, without arrays: it is asked at each step."""
        i = max(1, min(bisect_left(self.widths, num_tokens), len(self.widths) - 1))
        if len(self.widths) == 1 or num_tokens <= self.widths[0]:
            return self.seconds[0]
        slope = (self.seconds[i] - self.seconds[i - 1]) / (self.widths[i] - self.widths[i - 1])
        return self.seconds[i] + max(slope, 0.0) * (num_tokens - self.widths[i])


@dataclass
class StepCost:
    """What steps take: a table from the start of the engine, and what steps have taken since.

    There are three kinds: plain ones; those with guesses; and those for which proposers were asked in vain. Some of these
    come behind guesses, and so have waited for their tokens. What is missing in the table is mostly the host's: a form, a
    penalty, many requests. So it is added, not multiplied.
    """

    plain: Curve  # steps without guesses
    checked: Curve  # steps with guesses
    guess: float = 0.0  # seconds that the proposer takes for each guess, of all sequences together
    first_guess: float = 0.0  # and for the first one, more than that
    works: float = 1.0  # the part of the steps that are to have guesses in which the proposer does not sit out
    plain_more: float = 0.0  # seconds that steps take in truth, more than the table says, whatever their width
    checked_more: float = 0.0
    wait: float = 0.0  # seconds that a step takes more than a plain one where proposers were asked in vain
    num_plain: int = 0  # plain steps that were timed, and such as asked in vain
    num_vain: int = 0

    def of_plain(self, num_tokens: float) -> float:
        """Seconds of a step without guesses."""
        return corrected(self.plain.at(num_tokens), self.plain_more)

    def of_vain(self, num_tokens: float) -> float:
        """Seconds of a step that was to have guesses and got none."""
        return self.of_plain(num_tokens) + self.wait

    def of_narrow(self, num_tokens: float) -> float:
        """Seconds of a step with guesses; without arrays, as `of_plain`."""
        return corrected(self.checked.at(num_tokens), self.checked_more)

    def more(self, num_seqs: int, num_guessed: int) -> float:
        """Seconds that so many guesses add to a step by the table alone, which no interrupted step has changed."""
        return self.checked.at(num_seqs + num_guessed) - self.plain.at(num_seqs) if num_guessed else 0.0

    def of_checked(self, num_tokens: Floats, depths: npt.NDArray[np.integer], hits: Floats) -> Floats:
        """Seconds [n] of steps that are to have guesses, and of guessing, on average.

        Args:
            num_tokens: [n], of such steps, on average.
            depths: [n], guesses for the sequence with most.
            hits: [S], the chance of each sequence that there is a guess for it. Where nobody has one, the step has asked
                in vain; the others are so much the wider.
        """
        num_seqs, silent = len(hits), float(np.prod(1 - hits))
        some = max(1 - silent, HARDLY)  # the chance that anyone has a guess
        table = self.checked.of(num_seqs + (num_tokens - num_seqs) / some)
        checked = np.maximum(table + self.checked_more, LEAST * table)
        return silent * self.of_vain(num_seqs) + some * checked + self.of_guesses(depths)

    def of_guesses(self, depths: npt.NDArray[np.integer]) -> Floats:
        """Seconds [n] of guessing so many tokens in turn, for steps that are to have guesses, on average."""
        return self.works * (self.first_guess + self.guess * depths.astype(np.float64))

    def note(self, num_seqs: int, num_guessed: int, seconds: float) -> None:
        """A step took so long. One that took far too long, or that was interrupted, counts no more than twice its time.

        Plain steps are timed now and then, and count more, the first ones most; the very first counts as it is. None takes
        longer than one with guesses for the same sequences: where one seems to, it was timed badly.
        """
        if num_guessed:
            expected = self.of_narrow(num_seqs + num_guessed)
            self.checked_more += NEWS * (min(seconds, 2 * expected) - expected)
            self.plain_more -= NEWS * max(0.0, self.of_plain(num_seqs) - seconds)
        else:
            expected, self.num_plain = self.of_plain(num_seqs), self.num_plain + 1
            longest = 2 * expected if self.num_plain > 1 else seconds
            self.plain_more += max(RARE_NEWS, 1 / self.num_plain) * (min(seconds, longest) - expected)

    def fade(self) -> None:
        """Nobody has tried guesses for a while: what was found against them counts a little less, so that they are tried again."""
        self.checked_more -= FADE * max(0.0, self.checked_more)
        self.wait -= FADE * self.wait

    def note_work(self, did_work: bool) -> None:
        """A step was to have guesses, and its proposer worked for them or sat out."""
        self.works += NEWS * (did_work - self.works)

    def note_vain(self, num_tokens: int, seconds: float) -> None:
        """A step for which proposers were asked in vain took so long.

        No plain step takes longer: where one seems to, it was timed badly.
        """
        expected, self.num_vain = self.of_vain(num_tokens), self.num_vain + 1
        self.wait += max(NEWS, 1 / self.num_vain) * (min(seconds, 2 * expected) - expected)
        if self.wait < 0:
            self.plain_more, self.wait = self.plain_more + self.wait, 0.0


def corrected(table: float, more: float) -> float:
    """Seconds of a step by the table and by what is added; they never come near zero."""
    return max(table + more, LEAST * table)


def best_depths(hits: Floats, acceptances: Floats, cost: StepCost, most: int, margin: float = 1.0) -> list[int]:
    """The number of guesses for each sequence [S], 0 to `most`, that gives the most tokens a second.

    The j-th guess for a sequence comes with the chance `hit`, takes one token of the step's width, and is worth
    acceptance ** j. So sort all guesses of all sequences by worth, and take as many from the front as give the best ratio
    of tokens to time: for any width no other choice has more tokens. All zero unless that is `margin` times as good as to
    guess nothing. `cost.of_checked` gives the time of each width, `cost.of_plain` that of a step without guesses.
    """
    num_seqs = len(hits)
    worth = acceptances[:, None] ** np.arange(1, most + 1)  # [S, most]
    order = np.argsort(-worth, axis=None, kind="stable")
    seq, depth = order // most, order % most + 1
    tokens = num_seqs + np.cumsum(hits[seq] * worth.ravel()[order])
    width = num_seqs + np.cumsum(hits[seq])
    speed = tokens / cost.of_checked(width, np.maximum.accumulate(depth), hits)
    best = int(np.argmax(speed))
    if speed[best] <= margin * num_seqs / cost.of_plain(num_seqs):
        return [0] * num_seqs
    return np.bincount(seq[: best + 1], minlength=num_seqs).tolist()
