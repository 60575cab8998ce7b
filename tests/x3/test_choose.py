"""Speculation that never loses, in virtual time: a step costs what a table says, and texts repeat themselves or do not."""

from itertools import product
from math import prod
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from folovllm.spec_decode.adaptive import AdaptiveDepth, Estimate
from folovllm.spec_decode.budget import Budget
from folovllm.spec_decode.choose import Curve, StepCost, best_depths
from folovllm.spec_decode.ngram import NgramProposer
from folovllm.spec_decode.proposer import Depth, FixedDepth, Proposer, RowState
from folovllm.spec_decode.shadow import Shadow
from folovllm.step.draw import DrawSpec
from tests.tiny import worked_case
from tests.x3.guessing_loop import Clock


def costs(widths: tuple[float, ...], seconds: tuple[float, ...], wait: float = 0.0, guess: float = 0.0) -> StepCost:
    return StepCost(Curve(widths, seconds), Curve(widths, tuple(s + wait for s in seconds)), guess, wait=wait)


FLAT = costs((1.0, 64.0), (1.0, 1.063), wait=0.05)  # a GPU at small batch: a token more is nearly free
STEEP = costs((1.0, 2.0), (1.0, 1.8))  # a token more is nearly a step more


def adaptive(cost: StepCost, most: int, clock: Clock | None = None, probe: bool = False) -> AdaptiveDepth:
    return AdaptiveDepth(cost, most, Budget(4.0, clock or Clock()), probe)


def depths(*acceptances: float, cost: StepCost = FLAT, most: int = 8) -> list[int]:
    return best_depths(np.ones(len(acceptances)), np.array(acceptances), cost, most)


class TestBestDepths:
    def test_a_worked_case(self) -> None:
        """Seconds by tokens: 1 for one, 1.25 for two, 1.5 for three, and so on; with hits of 1 but where said otherwise."""
        line, jump = costs((1.0, 2.0), (1.0, 1.25)), costs((1.0, 2.0, 8.0), (1.0, 2.5, 2.5))
        got = {
            "right half the time": depths(0.5, cost=line, most=2),
            "never right": depths(0.0, cost=line, most=2),
            "one of two is right": depths(0.9, 0.1, cost=line, most=2),
            "a first guess is dear, all others are free": depths(0.9, cost=jump, most=7),
            "an idea once in a thousand steps": best_depths(np.array([0.001]), np.array([0.9]), FLAT, 8),
        }
        says = (
            "1, 1.5 and 1.75 tokens for 1, 1.25 and 1.5 seconds are 1, 1.2 and 1.17 a second; nothing for nothing; all width "
            "to the first, its guesses are worth 0.9 and 0.81; 1.9 tokens in 2.5 seconds are too few, 5.7 are enough; and "
            "waiting for an idea that does not come is no gain"
        )
        worked_case("x3.4", got, dict(zip(got, [[1], [0], [2, 0], [7], [0]], strict=True)), says)

    def test_nothing_is_accepted(self) -> None:
        assert depths(0.0) == [0], "guesses that are never right cost time"

    def test_all_is_accepted(self) -> None:
        assert depths(0.99) == [8], "nearly free, and nearly always right"
        assert depths(0.99, most=3) == [3], "no more than allowed"

    def test_wide_steps_that_cost_too_much(self) -> None:
        assert depths(0.7, cost=STEEP) == [0], "0.7 tokens more for 0.8 steps more"

    def test_who_is_right_more_often_guesses_more(self) -> None:
        found = depths(0.9, 0.1, cost=costs((1.0, 2.0, 9.0), (1.0, 1.2, 3.0)))
        assert found[0] > found[1], "the step's width belongs to the sequence whose guesses are right"

    def test_a_gain_below_the_margin_is_none(self) -> None:
        found = [best_depths(np.ones(1), np.array([0.5]), costs((1.0, 2.0), (1.0, 1.25)), 2, m) for m in (1.19, 1.21)]
        assert found == [[1], [0]], "one guess is 1.2 times as fast as none"

    def test_a_draft_writes_as_far_as_the_deepest_guess(self) -> None:
        """Both guesses of the first sequence are worth most, so a guess more of the second takes no step more of the draft."""
        found = depths(0.9, 0.4, cost=costs((1.0, 2.0), (1.0, 1.05), guess=0.3), most=2)
        assert found == [2, 2], "0.16 tokens more for 0.05 seconds: the draft takes two steps in any case"

    @given(
        st.lists(st.tuples(st.floats(0.1, 1), st.floats(0, 0.95)), min_size=1, max_size=3),
        st.floats(0, 0.6),
        st.floats(0, 0.5),
    )
    def test_no_other_choice_is_better(self, rows: list[tuple[float, float]], slope: float, wait: float) -> None:
        cost = costs((1.0, 2.0), (1.0, 1.0 + slope), wait)
        hits, acceptances = np.array(rows).T

        def speed(chosen: tuple[int, ...]) -> float:
            tokens = sum(1 + h * sum(a**j for j in range(1, k + 1)) for (h, a), k in zip(rows, chosen, strict=True))
            width = sum(h * k for (h, _), k in zip(rows, chosen, strict=True))
            silent = prod(1 - h for h, _ in rows)
            some = 1 - silent
            return tokens / (
                silent * cost.of_vain(len(rows)) + some * cost.of_narrow(len(rows) + width / some)
                if any(chosen)
                else cost.of_plain(len(rows))
            )

        found = best_depths(hits, acceptances, cost, 3)
        best = max(product(range(4), repeat=len(rows)), key=speed)
        assert speed(tuple(found)) >= speed(best) - 1e-9, (
            f"{found} gives {speed(tuple(found)):.3f} tokens a second, {list(best)} gives {speed(best):.3f}"
        )


class TestStepCost:
    def test_between_and_behind_the_table(self) -> None:
        curve, at = Curve((1.0, 3.0, 5.0), (1.0, 2.0, 6.0)), np.array([0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0])
        assert curve.of(at).tolist() == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 10.0]
        assert [curve.at(n) for n in at] == curve.of(at).tolist()
        assert [Curve((2.0,), (3.0,)).at(n) for n in (1.0, 5.0)] == [3.0, 3.0], "one point: no slope"

    def test_what_steps_take_corrects_the_table(self) -> None:
        cost = costs((1.0, 2.0), (1.0, 1.0))
        depth = adaptive(cost, 4)
        for _ in range(60):
            depth.observe_guessing(2, 0.1)
            depth.observe_step(1, 3, 2, 1, 1.6, asked=True)
        assert cost.checked_more == pytest.approx(0.5, rel=0.01), "the tenth that guessing took is no part of it"
        assert (cost.first_guess, cost.guess) == (pytest.approx(0.1, rel=0.01), 0.0), "however many they are"
        assert cost.of_checked(np.array([3.0]), np.array([2]), np.array([1.0])) == pytest.approx(1.5 + 0.1, rel=0.01)
        assert cost.plain_more == 0.0
        depth.observe_step(1, 30, 0, 0, 9.0, asked=False)
        assert cost.plain_more == 0.0, "a prompt says nothing of decodes"

    def test_what_a_dear_proposer_takes_is_timed_with_the_step(self) -> None:
        cost = costs((1.0, 9.0), (1.0, 1.0), guess=0.2)
        cost.first_guess = 0.1
        depth = adaptive(cost, 8, probe=True)
        for _ in range(60):
            depth.observe_guessing(4, 0.01)  # the host's part of it; the rest is the device's, before the step's own
            depth.observe_step(1, 5, 4, 4, 2.2, asked=True)
        assert (cost.first_guess, cost.guess) == (0.1, 0.2), "as measured"
        assert cost.of_checked(np.array([5.0]), np.array([4]), np.array([1.0])) == pytest.approx(2.2, rel=0.01)

    def test_a_step_that_waited_in_vain_cost_the_wait_and_no_more(self) -> None:
        cost = costs((1.0, 9.0), (1.0, 1.0))
        depth = adaptive(cost, 8)
        for _ in range(30):
            depth.observe_step(1, 1, 0, 0, 3.0, asked=False)  # forms, say
        assert cost.of_plain(1) == pytest.approx(3.0, rel=0.01) and cost.of_vain(1) == cost.of_plain(1)
        for _ in range(60):
            depth.observe_step(1, 1, 0, 0, 3.5, asked=True)
        assert cost.of_vain(1) == pytest.approx(3.5, rel=0.01) and cost.of_plain(1) == pytest.approx(3.0, rel=0.01)
        assert cost.checked_more == 0.0, "nothing was checked"

    def test_the_first_plain_steps_count_most(self) -> None:
        cost = costs((1.0, 9.0), (1.0, 1.0))
        for _ in range(4):
            cost.note(1, 0, 3.0)
        assert cost.of_plain(1) > 2.6, "a table that is far too low is corrected soon"

    def test_a_plain_step_takes_no_longer_than_one_that_waited(self) -> None:
        """While guesses are made no plain step is timed. One that was interrupted must not make guesses pay for ever."""
        cost = costs((1.0, 9.0), (1.0, 1.0))
        cost.note(1, 0, 2.0)
        for _ in range(60):
            cost.note_vain(1, 1.1)
        assert cost.of_plain(1) == pytest.approx(1.1, rel=0.01)

    def test_a_plain_step_takes_no_longer_than_one_with_guesses(self) -> None:
        """Else any guess would seem to pay: steps with guesses are timed often, and plain ones meanwhile not at all."""
        cost = costs((1.0, 9.0), (1.0, 1.0))
        cost.note(1, 0, 9.0)
        for _ in range(60):
            cost.note(1, 2, 2.0)
        assert cost.of_plain(1) == pytest.approx(2.0, rel=0.01)

    def test_a_step_with_guesses_may_take_less_than_a_plain_one_of_as_many_tokens(self) -> None:
        """On a CPU nine tokens of one sequence take less than nine sequences with a token each. One sequence takes as long as ever."""
        cost = StepCost(Curve((1.0, 8.0), (1.0, 6.0)), Curve((1.0, 9.0), (1.0, 7.0)))
        for _ in range(60):
            cost.note(1, 8, 3.0)
        assert cost.plain_more == 0.0 and cost.of_narrow(9) == pytest.approx(3.0, rel=0.01)

    def test_a_table_that_is_too_high_is_never_corrected_to_nothing(self) -> None:
        cost = costs((1.0, 2.0), (1.0, 9.0))
        for _ in range(99):
            cost.note(2, 0, 0.0)
        assert cost.of_plain(1) > 0 and cost.of_plain(2) < 2

    def test_an_interrupted_step_changes_little(self) -> None:
        cost = costs((1.0, 2.0), (1.0, 1.0))
        cost.note(1, 1, 1000.0)
        assert cost.checked_more <= 0.1


@pytest.mark.parametrize("wait", [0.0, 0.1, 0.4, 2.0])
@pytest.mark.parametrize("num_seqs", [1, 3, 30])
def test_what_cannot_pay_is_seen_without_asking_for_the_best_depths(num_seqs: int, wait: float) -> None:
    """Never where guesses would pay; and at once where there are hardly any."""
    cost, rng = costs((1.0, 2.0, 8.0, 64.0), (1.0, 1.2, 1.3, 3.0), wait), np.random.default_rng(num_seqs)
    for scale in [1.0, 0.3] * 50 + [0.01]:
        depth = adaptive(cost, 8)
        hits, rights = scale * rng.random(num_seqs) ** 3, rng.random(num_seqs)
        depth._own = {i: Estimate(h, 1 - h, a, 1 - a) for i, (h, a) in enumerate(zip(hits, rights, strict=True))}
        can_pay = depth._can_pay(list(depth._own.values()))
        assert can_pay or not any(best_depths(hits, rights, cost, 8, depth.MARGIN))
    assert not can_pay or wait == 0.0


def test_where_the_first_guess_alone_pays_it_is_asked_for() -> None:
    """Few guesses, which cost nearly nothing, and each one more a lot: no width of the table pays."""
    cost, rng = (
        StepCost(Curve((1.0, 64.0), (2.0, 2.0)), Curve((1.0, 2.0, 8.0), (1.0, 1.0, 6.0))),
        np.random.default_rng(3),
    )
    depth, hits, rights = adaptive(cost, 8), rng.random((20, 3)) ** 3, rng.random((20, 3))
    for own, right in zip(hits, rights, strict=True):
        depth._own = {i: Estimate(h, 1 - h, a, 1 - a) for i, (h, a) in enumerate(zip(own, right, strict=True))}
        assert depth._can_pay(list(depth._own.values())) or not any(best_depths(own, right, cost, 8, depth.MARGIN))


def test_an_estimate_follows_the_text() -> None:
    known = Estimate(1.0, 0.0, 0.5, 0.5)
    for _ in range(30):
        known.note(4, 4, 0.9)
    assert known.acceptance > 0.95
    for _ in range(30):
        known.note(4, 0, 0.9)
    assert known.acceptance < 0.2
    for _ in range(20_000):
        known.note(0, 0, 0.9)
    assert known.acceptance < 0.2, "silence says nothing of the guesses there were"
    assert known.hit < 0.01
    depth = adaptive(FLAT, 8)
    depth._own[0] = known
    assert depth.choose([0]) == [0] and best_depths(np.zeros(2), np.full(2, 0.9), FLAT, 8) == [0, 0], (
        "no idea is no guess"
    )


class Guesser(Proposer):
    """Right with a chance that the text sets; guesses of a draft, say."""

    def __init__(self, texts: dict[int, list[int]], chance: float) -> None:
        self._texts, self._chance, self._random, self.asked = texts, chance, Random(1), 0

    def propose(self, state: RowState, k: int) -> list[int]:
        self.asked += 1
        at = len(state.token_ids)
        return [t if self._random.random() < self._chance else -1 for t in self._texts[state.seq_id][at : at + k]]


def virtual_seconds(
    texts: dict[int, list[int]], proposer: Proposer, depth: Depth, cost: StepCost, clock: Clock | None = None
) -> tuple[float, list[int]]:
    """The time to write all texts, and the sum of guesses asked for in each step, as an engine would go about it."""
    clock = clock or Clock()
    written, begin, asked, resting, ks = dict.fromkeys(texts, 1), clock.now, list[int](), 0, {}
    plain, checked, wait, guess_price = cost.plain, cost.checked, cost.wait, cost.guess  # `depth` may change its mind

    def state(seq_id: int) -> RowState:
        return RowState(seq_id, np.array(texts[seq_id][: written[seq_id]], np.int32), 1, DrawSpec())

    for seq_id in texts:
        proposer.admit(state(seq_id))
    while written:
        ids = list(written)
        if not resting:
            idle = [i for i in ids if not ks.get(i)]
            proposer.look([state(i) for i in idle[: proposer.num_looks()]])
        chosen = depth.choose(ids) if not resting else [0] * len(ids)
        ks, resting = dict(zip(ids, chosen, strict=True)), 0 if any(chosen) else (resting or depth.rest or 1) - 1
        guesses = proposer.propose_all([state(i) for i in ids], chosen) if any(chosen) else [[] for _ in ids]
        width = len(ids) + sum(map(len, guesses))
        seconds = checked.at(width) if any(guesses) else plain.at(width) + (wait if any(chosen) else 0)
        if any(chosen):
            depth.observe_guessing(max(chosen), guess_price * max(chosen))
        asked.append(sum(chosen))
        num_right = 0
        for seq_id, k, guess in zip(ids, chosen, guesses, strict=True):
            rest = texts[seq_id][written[seq_id] :]
            right = next((i for i, (g, t) in enumerate(zip(guess, rest, strict=False)) if g != t), len(guess))
            if guess or (k and not isinstance(proposer, Shadow)):  # which says itself that it has no idea
                depth.observe(seq_id, len(guess), right)
            num_right += right
            proposer.observe(seq_id, rest[: right + 1])
            written[seq_id] += right + 1
            if written[seq_id] >= len(texts[seq_id]):
                del written[seq_id]
                proposer.finish(seq_id)
                depth.finish(seq_id)
        seconds += guess_price * max(chosen)
        depth.observe_step(len(ids), width, width - len(ids), num_right, seconds, any(chosen))
        clock.now += seconds
    return clock.now - begin, asked


def noise(length: int, seed: int = 0) -> list[int]:
    return [Random(seed * 10**6 + i).randrange(200) for i in range(length)]


FREE = Budget(1.0, Clock())  # by a clock that stands still: looks cost nothing


def shadowed(cost: StepCost, clock: Clock) -> tuple[Proposer, AdaptiveDepth]:
    depth = adaptive(cost, 8, clock)
    return Shadow(NgramProposer(1, 3), depth, FREE), depth


@pytest.mark.parametrize("cost", [FLAT, STEEP])
def test_without_repetition_it_turns_itself_off(cost: StepCost) -> None:
    texts = {i: noise(600, i) for i in range(3)}
    plain, _ = virtual_seconds(texts, NgramProposer(), FixedDepth(0), cost)
    seconds, asked = virtual_seconds(texts, *shadowed(cost, clock := Clock()), cost, clock)
    assert seconds < 1.02 * plain
    assert sum(map(bool, asked[50:])) <= 0.05 * len(asked)


def test_on_repetition_it_guesses_far() -> None:
    texts = {0: noise(30) * 20}
    plain, _ = virtual_seconds(texts, NgramProposer(), FixedDepth(0), FLAT)
    seconds, asked = virtual_seconds(texts, *shadowed(FLAT, clock := Clock()), FLAT, clock)
    assert asked[-1] == 8
    assert plain > 5 * seconds


def test_it_comes_back_when_the_text_begins_to_repeat_itself() -> None:
    text = {0: noise(300) + noise(30, 9) * 10}
    _, asked = virtual_seconds(text, *shadowed(FLAT, clock := Clock()), FLAT, clock)
    assert not any(asked[200:290]), "off while nothing repeats"
    assert asked[-1] == 8, "on again: guesses were scored in the shadow"


def test_one_sequence_repeats_and_the_other_does_not() -> None:
    texts = {0: noise(25) * 20, 1: noise(250, 5)}
    plain, _ = virtual_seconds(texts, NgramProposer(), FixedDepth(0), FLAT)
    seconds, _ = virtual_seconds(texts, *shadowed(FLAT, clock := Clock()), FLAT, clock)
    assert seconds < 0.6 * plain


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.8])
def test_a_dear_proposer_is_probed_now_and_then(chance: float) -> None:
    cost = costs((1.0, 64.0), (1.0, 1.063), wait=0.1, guess=0.2)
    texts = {0: noise(800)}
    plain, _ = virtual_seconds(texts, Guesser(texts, 0), FixedDepth(0), cost)
    depth = adaptive(cost, 8, clock := Clock(), probe=True)
    seconds, asked = virtual_seconds(texts, Guesser(texts, chance), depth, cost, clock)
    if chance < 0.5:
        assert seconds < 1.02 * plain
        assert any(asked[-200:]), "it keeps looking whether guesses have become better"
    else:
        assert plain > 1.5 * seconds


def test_catching_up_is_no_price_of_guesses_and_makes_probes_rarer() -> None:
    cost = costs((1.0, 64.0), (1.0, 1.063), guess=0.01)
    depth, num_probes = adaptive(cost, 8, clock := Clock(), probe=True), 0
    for _ in range(20_000):
        if depth.choose([0])[0]:
            num_probes += 1
            depth.observe(0, 2, 0)
            depth.observe_guessing(0, 4.0)
            depth.observe_step(1, 3, 2, 0, 9.0, asked=True)
            clock.now += 9.0
        else:
            clock.now += depth.rest
    assert (cost.first_guess, cost.checked_more) == (0.0, 0.0)
    assert 100 < 9.0 * num_probes < 0.02 * clock.now, "all that a probe takes is saved up, what it caught up with, too"


def test_prompts_beside_a_text_that_is_caught_up_with_are_not_paid_for() -> None:
    """What is paid for is what the step takes more than one of as many tokens without guesses."""
    cost = costs((1.0, 401.0), (1.0, 5.0))
    budget = Budget(4.0, Clock())
    depth = AdaptiveDepth(cost, 8, budget, probe=True)
    depth.observe_guessing(0, 0.5)
    depth.observe_step(2, 403, 2, 0, cost.of_plain(401) + 1.0, asked=True)
    assert budget.left() == pytest.approx(3.0)


def test_a_probe_finds_out_that_guesses_have_become_better() -> None:
    cost = costs((1.0, 64.0), (1.0, 1.063), wait=0.1, guess=0.1)
    texts = {0: noise(3000)}
    guesser = Guesser(texts, 0.0)
    depth = adaptive(cost, 4, clock := Clock(), probe=True)
    virtual_seconds({0: texts[0][:500]}, guesser, depth, cost, clock)
    guesser._chance = 0.95
    _, asked = virtual_seconds(texts, guesser, depth, cost, clock)
    assert asked[-1] == 4


class TestShadow:
    def test_only_a_few_sequences_are_watched(self) -> None:
        texts = {i: noise(30, i) for i in range(20)}
        guesser = Guesser(texts, 0.5)
        virtual_seconds(texts, Shadow(guesser, FixedDepth(0), FREE, most=3), FixedDepth(0), FLAT)
        assert guesser.asked <= 3 * 30, "the cost must not grow with the batch"

    def test_what_the_model_checks_is_not_counted_twice(self) -> None:
        seen: list[tuple[int, int]] = []

        class Listening(FixedDepth):
            def observe(self, seq_id: int, num_guessed: int, num_accepted: int) -> None:
                seen.append((num_guessed, num_accepted))

        texts = {0: noise(20)}
        depth = Listening(2)
        virtual_seconds(texts, Shadow(Guesser(texts, 1.0), depth, FREE), depth, FLAT)
        assert len(seen) == 7, "19 tokens, three a step"

    def test_a_guess_is_judged_over_several_steps(self) -> None:
        seen: list[tuple[int, int]] = []

        class Listening(FixedDepth):
            def observe(self, seq_id: int, num_guessed: int, num_accepted: int) -> None:
                seen.append((num_guessed, num_accepted))

        texts = {0: noise(14)}
        depth = Listening(0)
        virtual_seconds(texts, Shadow(Guesser(texts, 1.0), depth, FREE, k=4), depth, FLAT)
        assert seen == [(4, 4)] * 2, "of the tokens 1 to 4 and 6 to 9; the last three are not judged to their end"
