"""How many tokens to guess, so that speculation never loses: by what was accepted and by what a step costs.

A step over one sequence and k guesses gives 1 + a + a^2 + ... + a^k tokens, if each guess is right with probability a where
all before it were (Leviathan et al., arXiv 2211.17192, section 3.1). It costs more than a step without guesses. Where the
proposer has no idea, a step that was to have guesses costs little more than a plain one. What counts is the ratio of tokens
to seconds, over the whole batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from folovllm.spec.proposer import Depth

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
        return silent * self.of_vain(num_seqs) + some * checked + self.first_guess + self.guess * depths

    def note(self, num_tokens: int, is_checked: bool, seconds: float) -> None:
        """A step took so long. One that took far too long, or that was interrupted, counts no more than twice its time.

        Plain steps are timed now and then, and count more, the first ones most.
        """
        if is_checked:
            expected = self.of_narrow(num_tokens)
            self.checked_more += NEWS * (min(seconds, 2 * expected) - expected)
        else:
            expected, self.num_plain = self.of_plain(num_tokens), self.num_plain + 1
            self.plain_more += max(RARE_NEWS, 1 / self.num_plain) * (min(seconds, 2 * expected) - expected)

    def fade(self) -> None:
        """Nobody has tried guesses for a while: what was found against them counts a little less, so that they are tried again."""
        self.checked_more -= FADE * max(0.0, self.checked_more)
        self.wait -= FADE * self.wait

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


@dataclass
class Estimate:
    """What is known of the guesses for a sequence. Old observations fade, so that it follows the text."""

    offered: float  # steps in which there was a guess
    silent: float  # steps in which there was none
    right: float  # guesses that were right
    wrong: float  # guesses that were the first wrong one of a step

    @property
    def hit(self) -> float:
        """The chance that there is a guess."""
        return self.offered / (self.offered + self.silent)

    @property
    def acceptance(self) -> float:
        """The chance that a guess is right if those before it were."""
        return self.right / (self.right + self.wrong)

    def tokens(self, k: int) -> float:
        """Tokens more than one that `k` guesses bring to a step."""
        a = self.acceptance
        return self.hit * (k if a > 0.999 else a * (1 - a**k) / (1 - a))

    def note(self, num_guessed: int, num_accepted: int, keep: float) -> None:
        """A step more; what was known before counts `keep` times as much as until now."""
        self.offered = keep * self.offered + (num_guessed > 0)
        self.silent = keep * self.silent + (num_guessed == 0)
        if num_guessed:
            self.right = keep * self.right + num_accepted
            self.wrong = keep * self.wrong + (num_accepted < num_guessed)

    def start(self, weight: float) -> Estimate:
        """The same opinion with the weight of `weight` steps: what to think of a sequence that nothing is known of."""
        return Estimate(
            weight * self.hit, weight * (1 - self.hit), weight * self.acceptance, weight * (1 - self.acceptance)
        )


def best_depths(hits: Floats, acceptances: Floats, cost: StepCost, most: int, margin: float = 1.0) -> list[int]:
    """The number of guesses for each sequence [S], 0 to `most`, that gives the most tokens a second.

    The j-th guess for a sequence comes with the chance `hit`, takes one token of the step's width, and is worth
    acceptance ** j. So sort all guesses of all sequences by worth, and take as many from the front as give the best ratio
    of tokens to time: for any width no other choice has more tokens. All zero unless that is `margin` times as good as to
    guess nothing.
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


class AdaptiveDepth(Depth):
    """Guesses as many tokens as pays, for each sequence; none where it does not pay.

    While it guesses nothing it learns from guesses that are compared with what was drawn and never checked by the model
    (`Shadow`), or, where a proposer is too dear for that, from a step with guesses now and then (`probe`).

    Attributes:
        cost: what steps take, as far as is known.
    """

    KEEP, KEEP_COMMON = 0.9, 0.99  # what an observation counts a step later: for its sequence, and for those to come
    WEIGHT = 2.0  # steps that the opinion of all sequences counts at the start of one
    MARGIN = 1.02
    HOLD, FIRST = 8, 3  # steps with guesses from one decision to the next; if it is the first of a sequence
    PAUSE, LONGEST = 8, 64  # steps without: it is asked after 8, then after 16, ...
    PROBE_SHARE = 0.01  # of the time, for probes

    def __init__(self, cost: StepCost, most: int, probe: bool = False) -> None:
        """`most`: guesses for a sequence in a step. `probe`: whether nobody scores guesses while there are none."""
        self.cost, self._most, self._probe = cost, most, probe
        self._common = Estimate(1.0, 0.0, 0.5, 0.5)
        self._own: dict[int, Estimate] = {}
        self._decided: dict[int, int] = {}  # by seq_id; empty: nothing for anyone
        self._age = 0  # steps that it has served
        self._is_off = False  # no guesses were asked for last
        self._until_probe = 0.0  # seconds to save up
        self._num_probes = 0
        self._guessing = 0.0  # seconds, since the last step
        self._caught_up = False  # since then: a step that says nothing of others, and that is dear

    def choose(self, seq_ids: Sequence[int]) -> list[int]:
        """As `Depth`."""
        if not seq_ids:
            return []
        self._age += 1
        if (is_first := not self._decided.keys() >= set(seq_ids)) or self._age >= self.HOLD:
            self._decided, self._age = self._decide(seq_ids), self.HOLD - self.FIRST if is_first else 0
        if any(depths := [self._decided.get(seq_id, 0) for seq_id in seq_ids]):
            self._is_off, self.rest = False, 0
            return depths
        self.cost.fade()
        is_long = self._is_off and not self._probe
        self._is_off, self.rest = True, min(2 * self.rest, self.LONGEST) if is_long else self.PAUSE
        return self._probed(depths) if self._probe else depths

    def _decide(self, seq_ids: Sequence[int]) -> dict[int, int]:
        if not self._can_pay(seq_ids):
            return {}
        known = [self.estimate(seq_id) for seq_id in seq_ids]
        hits, acceptances = np.array([(e.hit, e.acceptance) for e in known]).T
        depths = best_depths(hits, acceptances, self.cost, self._most, self.MARGIN)
        return dict(zip(seq_ids, depths, strict=True))

    def _can_pay(self, seq_ids: Sequence[int]) -> bool:
        """False where it is certain that guesses do not pay, which takes less to see than `best_depths` takes to say.

        Of steps of which as many as can be have guesses, w of them: they bring no more than w times the most likely guess,
        nor more than all that all guesses bring. Tokens and seconds lie on lines between the widths of the table: their
        ratio is largest at one of these, or at 0.
        """
        n, cost, silent = len(seq_ids), self.cost, 1.0
        found = [(self._own[seq_id], 1) for seq_id in seq_ids if seq_id in self._own]
        found.append((self._common, n - len(found)))
        for e, count in found:
            silent *= (1 - e.hit) ** count
        some, vain = max(1 - silent, HARDLY), silent * cost.of_vain(n)  # some: the chance that anyone has a guess
        widest = self._most * sum(e.hit * count for e, count in found) / some
        most, likely = sum(e.tokens(self._most) * count for e, count in found), max(e.acceptance for e, _ in found)
        widths = [0.0, *(w - n for w in cost.checked.widths if n < w < n + widest), widest]
        if likely > 0:
            widths.append(min(most / likely / some, widest))
        vain += cost.first_guess + cost.guess
        speed = max((n + min(most, likely * some * w)) / (some * cost.of_narrow(n + w) + vain) for w in widths)
        return speed > self.MARGIN * n / cost.of_plain(n)

    def _probed(self, depths: list[int]) -> list[int]:
        """`depths`, all 0, or a few guesses for one sequence, as rarely as `PROBE_SHARE` demands."""
        few, turn = min(2, self._most), self._num_probes % len(depths)
        plain = self.cost.of_plain(len(depths))
        self._until_probe -= self.PROBE_SHARE * plain * self.PAUSE
        if self._until_probe > 0:
            return depths
        probe = self.cost.of_narrow(len(depths) + few) + self.cost.first_guess + self.cost.guess * few
        self._until_probe = max(0.0, probe - plain)
        self._num_probes += 1
        return [few if i == turn else 0 for i in range(len(depths))]

    def estimate(self, seq_id: int) -> Estimate:
        """What is known of a sequence; of a new one, what is known of all."""
        return self._own.get(seq_id) or self._common

    def observe(self, seq_id: int, num_guessed: int, num_accepted: int) -> None:
        """As `Depth`. No guess where one was asked for counts, too."""
        if seq_id not in self._own:
            self._own[seq_id] = self._common.start(self.WEIGHT)
        self._own[seq_id].note(num_guessed, num_accepted, self.KEEP)
        self._common.note(num_guessed, num_accepted, self.KEEP_COMMON)

    def observe_guessing(self, num_guesses: int, seconds: float) -> None:
        """As `Depth`. A dear proposer may still be at it while the step begins: only both together can be timed, and what is
        more than was found at the start counts as the step's.
        """
        if not num_guesses:
            self._caught_up = True
        elif self._probe:
            self._guessing += self.cost.first_guess + self.cost.guess * num_guesses
        else:
            self._guessing += seconds
            self.cost.first_guess += (NEWS if self.cost.first_guess else 1.0) * (seconds - self.cost.first_guess)

    def observe_step(self, num_seqs: int, num_tokens: int, num_guessed: int, seconds: float, asked: bool) -> None:
        """As `Depth`. The time for guessing is not the step's. Steps with parts of prompts say nothing here."""
        if self._caught_up:
            self._until_probe += max(0.0, seconds - self.cost.of_narrow(num_tokens))
            self._caught_up, self._guessing = False, 0.0
            return
        seconds, self._guessing = seconds - self._guessing, 0.0
        if num_tokens != num_seqs + num_guessed or seconds <= 0:
            return
        if asked and not num_guessed:
            self.cost.note_vain(num_tokens, seconds)
        else:
            self.cost.note(num_tokens, num_guessed > 0, seconds)

    def finish(self, seq_id: int) -> None:
        """As `Depth`."""
        self._own.pop(seq_id, None)
