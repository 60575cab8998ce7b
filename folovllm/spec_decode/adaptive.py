"""Who guesses how far, decided by what came of guesses so far; and what trying may cost where they do not pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from folovllm.spec_decode.budget import Budget
from folovllm.spec_decode.choose import HARDLY, NEWS, StepCost, best_depths
from folovllm.spec_decode.proposer import Depth


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


NO_IDEA = Estimate(0.0, 1.0, 0.0, 1.0)  # of a sequence that may not begin now


class AdaptiveDepth(Depth):
    """Guesses as many tokens as pays, for each sequence; none where it does not pay.

    While it guesses nothing it learns from guesses that are compared with what was drawn and never checked by the model
    (`Shadow`), or, where a proposer is too dear for that, from a step with guesses now and then (`probe`).

    What guesses cost is paid from a `Budget`, and what they win goes there; looks, and to find out that nobody gets any, are
    paid from it, too. While something is owed nobody gets guesses of whom nothing is known but what is known of all, and a
    rest lasts until the next choice can be paid; else few of these at a time, since the proposer must read their texts.
    Steps in which only answers with a form get guesses pay no more than there is: no debt stops these, so they make none.

    Attributes:
        cost: what steps take, as far as is known.
    """

    KEEP, KEEP_COMMON = 0.9, 0.99  # what an observation counts a step later: for its sequence, and for those to come
    WEIGHT = 2.0  # steps that the opinion of all sequences counts at the start of one
    MARGIN = 1.02
    HOLD, FIRST = 8, 3  # steps with guesses from one decision to the next; if nothing is known of a sequence
    PAUSE, LONGEST = 8, 64  # steps without: it is asked after 8, then after 16, ...
    IN_DEBT = 512  # the longest rest until a debt is paid back
    FIRST_OPINION = Estimate(8.0, 0.0, 7.6, 0.4)  # of a proposer that nobody scores: who asks for one means it
    FEW = 4  # sequences that nothing is known of that begin at once, and as many more as something is known of

    def __init__(self, cost: StepCost, most: int, budget: Budget, probe: bool = False) -> None:
        """`most`: guesses for a sequence in a step. `probe`: whether nobody scores guesses while there are none."""
        self.cost, self._most, self._budget, self._probe = cost, most, budget, probe
        nobody = Estimate(0.0, 1.0, 0.5, 0.5)  # has had an idea yet
        # What is known of all answers without a form, and of all that have one: of forms a proposer knows nothing.
        self._common, self._common_of_forms = replace(self.FIRST_OPINION) if probe else replace(nobody), nobody
        self._formed: set[int] = set()  # by seq_id
        self._own: dict[int, Estimate] = {}
        self._decided: dict[int, int] = {}  # by seq_id; empty: nothing for anyone
        self.rest = self.PAUSE  # at first, too: what plain steps take is timed in it
        self._age = 0  # steps that it has served
        self._is_off = False  # no guesses were asked for last
        self._owes = False  # some were, and not for answers with a form alone
        self._num_probes = 0
        self._guessing = 0.0  # seconds, since the last step
        self._caught_up = False  # since then: a step that says nothing of others, and that is dear

    def choose(self, seq_ids: Sequence[int]) -> list[int]:
        """As `Depth`."""
        if not seq_ids:
            return []
        self._age += 1
        if not self._decided.keys() >= set(seq_ids) or self._age >= self.HOLD:
            self._decided = self._decide(seq_ids)
            self._age = 0 if self._own.keys() >= set(seq_ids) else self.HOLD - self.FIRST
        if any(depths := [self._decided.get(seq_id, 0) for seq_id in seq_ids]):
            self._is_off, self.rest = False, 0
            self._owes = any(k and seq_id not in self._formed for seq_id, k in zip(seq_ids, depths, strict=True))
            return depths
        self.cost.fade()
        self._is_off, self.rest = True, min(2 * self.rest, self.LONGEST) if self._is_off else self.PAUSE
        return self._probed(depths) if self._probe else depths

    def _decide(self, seq_ids: Sequence[int]) -> dict[int, int]:
        can_begin = self._budget.left() > 0
        known = [self.estimate(i) if can_begin or i in self._own else NO_IDEA for i in seq_ids]
        if not self._can_pay(known):
            return {}
        hits, acceptances = np.array([(e.hit, e.acceptance) for e in known]).T
        depths = best_depths(hits, acceptances, self.cost, self._most, self.MARGIN)
        if not any(depths):
            return {}
        decided = dict(zip(seq_ids, depths, strict=True))
        if self._probe:
            return decided  # such a proposer reads all texts in one step
        new = [i for i in seq_ids if decided[i] and i not in self._own]
        return decided | dict.fromkeys(new[self.FEW + len(self._own) :], 0)

    def _can_pay(self, known: Sequence[Estimate]) -> bool:
        """False where it is certain that guesses do not pay, which takes less to see than `best_depths` takes to say.

        Of steps of which as many as can be have guesses, w of them: they bring no more than w times the most likely guess,
        nor more than all that all guesses bring. Tokens and seconds lie on lines between the widths of the table: their
        ratio is largest at one of these, or at 0.
        """
        found = [e for e in known if e.hit > 0]
        if not found:
            return False
        n, cost, silent = len(known), self.cost, math.prod(1 - e.hit for e in found)
        some = max(1 - silent, HARDLY)  # the chance that anyone has a guess
        guessing = cost.works * (cost.first_guess + cost.guess)
        beside = silent * cost.of_vain(n) + guessing  # seconds, but for steps with guesses
        widest = self._most * sum(e.hit for e in found) / some
        most, likely = sum(e.tokens(self._most) for e in found), max(e.acceptance for e in found)
        widths = [0.0, *(w - n for w in cost.checked.widths if n < w < n + widest), widest]
        if likely > 0:
            widths.append(min(most / likely / some, widest))
        speed = max((n + min(most, likely * some * w)) / (some * cost.of_narrow(n + w) + beside) for w in widths)
        return speed > self.MARGIN * n / cost.of_plain(n)

    def _probed(self, depths: list[int]) -> list[int]:
        """`depths`, all 0; or a few guesses for one sequence, if the budget has some."""
        if self._budget.left() <= 0:
            return depths
        few, turn = min(2, self._most), self._num_probes % len(depths)
        self._owes, self._num_probes = True, self._num_probes + 1
        return [few if i == turn else 0 for i in range(len(depths))]

    def estimate(self, seq_id: int) -> Estimate:
        """What is known of a sequence; of a new one, what is known of all that have a form as well, or have none."""
        return self._own.get(seq_id) or self._common_of(seq_id)

    def _common_of(self, seq_id: int) -> Estimate:
        return self._common_of_forms if seq_id in self._formed else self._common

    def note_form(self, seq_id: int) -> None:
        """As `Depth`."""
        self._formed.add(seq_id)

    def observe(self, seq_id: int, num_guessed: int, num_accepted: int) -> None:
        """As `Depth`. No guess where one was asked for counts, too."""
        common = self._common_of(seq_id)
        if seq_id not in self._own:
            self._own[seq_id] = common.start(self.WEIGHT)
        self._own[seq_id].note(num_guessed, num_accepted, self.KEEP)
        common.note(num_guessed, num_accepted, self.KEEP_COMMON)

    def observe_choice(self, num_seqs: int, seconds: float) -> None:
        """As `Depth`. The steps that are timed around a rest take about as long again."""
        price = 2 * seconds
        self._budget.pay(price)
        left = self._budget.left()
        if left < 0:  # rest until the next choice can be paid: then somebody may look
            steps = (price - left) / (Budget.SHARE * self.cost.of_plain(num_seqs))
            self.rest = max(self.rest, int(min(steps, self.IN_DEBT)))

    def observe_guessing(self, num_guesses: int, seconds: float) -> None:
        """As `Depth`. A dear proposer may still be at it while the step begins: only both together can be timed, and what is
        more than was found at the start counts as the step's.
        """
        cost = self.cost
        if self._probe:
            self._caught_up = self._caught_up or not num_guesses
            seconds = cost.first_guess + cost.guess * num_guesses if num_guesses else 0.0
        elif num_guesses:
            cost.first_guess += (NEWS if cost.first_guess else 1.0) * (seconds - cost.first_guess)
        self._guessing += seconds
        self._pay(seconds)

    def observe_step(
        self, num_seqs: int, num_tokens: int, num_guessed: int, num_right: int, seconds: float, asked: bool
    ) -> None:
        """As `Depth`. The time for guessing is not the step's. Steps with parts of prompts say nothing here."""
        cost = self.cost
        if asked and self._probe:
            cost.note_work(self._guessing > 0 or self._caught_up)
        seconds, self._guessing = seconds - self._guessing, 0.0
        if self._caught_up:
            self._pay(max(0.0, seconds - cost.of_plain(num_tokens - num_guessed)))
            self._caught_up = False
            return
        if num_tokens != num_seqs + num_guessed or seconds <= 0:
            return
        if asked and not num_guessed:
            self._pay(cost.wait)
            cost.note_vain(num_tokens, seconds)
        else:
            self._pay(cost.more(num_seqs, num_guessed) - cost.of_plain(num_seqs) * num_right / num_seqs)
            cost.note(num_seqs, num_guessed, seconds)

    def _pay(self, seconds: float) -> None:
        self._budget.pay(seconds if self._owes else min(seconds, max(0.0, self._budget.left())))

    def finish(self, seq_id: int) -> None:
        """As `Depth`."""
        self._own.pop(seq_id, None)
        self._formed.discard(seq_id)
