"""Draft lengths that give the most tokens a second, and what steps cost."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from folovllm.electives.spec_decode.choose import Curve, StepCost, best_draft_lengths
from tests.tiny import worked_case


def costs(
    widths: tuple[float, ...], seconds: tuple[float, ...], no_draft: float = 0.0, per_draft_token: float = 0.0
) -> StepCost:
    return StepCost(Curve(widths, seconds), 0.0, per_draft_token, first_draft_token=no_draft)


FLAT = costs((1.0, 64.0), (1.0, 1.063), no_draft=0.05)  # a GPU at small batch: a token more is nearly free
STEEP = costs((1.0, 2.0), (1.0, 1.8))  # a token more is nearly a step more


def depths(*acceptances: float, cost: StepCost = FLAT, most: int = 8) -> list[int]:
    return best_draft_lengths(np.ones(len(acceptances)), np.array(acceptances), cost, most)


class TestBestDraftLengths:
    def test_a_worked_case(self) -> None:
        """Seconds by tokens: 1 for one, 1.25 for two, 1.5 for three, and so on; with hits of 1 but where said otherwise."""
        line, jump = costs((1.0, 2.0), (1.0, 1.25)), costs((1.0, 2.0, 8.0), (1.0, 2.5, 2.5))
        got = {
            "accepted half the time": depths(0.5, cost=line, most=2),
            "never accepted": depths(0.0, cost=line, most=2),
            "one of two is accepted": depths(0.9, 0.1, cost=line, most=2),
            "a first draft token is expensive, all others are free": depths(0.9, cost=jump, most=7),
            "a draft once in a thousand steps": best_draft_lengths(np.array([0.001]), np.array([0.9]), FLAT, 8),
        }
        says = (
            "1, 1.5 and 1.75 tokens for 1, 1.25 and 1.5 seconds are 1, 1.2 and 1.17 a second; nothing for nothing; all width "
            "to the first, its draft tokens are worth 0.9 and 0.81; 1.9 tokens in 2.5 seconds are too few, 5.7 are enough; and "
            "waiting for an idea that does not come is no gain"
        )
        worked_case("x3.4", got, dict(zip(got, [[1], [0], [2, 0], [7], [0]], strict=True)), says)

    def test_nothing_is_accepted(self) -> None:
        assert depths(0.0) == [0], "drafts that are never right cost time"

    def test_all_is_accepted(self) -> None:
        assert depths(0.99) == [8], "nearly free, and nearly always right"
        assert depths(0.99, most=3) == [3], "no more than allowed"

    def test_wide_steps_that_cost_too_much(self) -> None:
        assert depths(0.7, cost=STEEP) == [0], "0.7 tokens more for 0.8 steps more"

    def test_who_is_right_more_often_drafts_more(self) -> None:
        found = depths(0.9, 0.1, cost=costs((1.0, 2.0, 9.0), (1.0, 1.2, 3.0)))
        assert found[0] > found[1], "the step's width belongs to the sequence whose drafts are right"

    def test_a_slower_width_may_stand_before_the_best(self) -> None:
        found = depths(0.95, cost=costs((1.0, 4.0, 5.0, 64.0), (1.0, 1.0, 1.5, 1.5)))
        assert found == [8], "the fifth token takes half a step more, and all behind it are free: look at all widths"

    def test_a_rare_draft_that_is_right_comes_first(self) -> None:
        """One sequence drafts each time and is right half the time; the other one time in five, and is right."""
        cost = costs((1.0, 2.0, 2.2, 10.0), (1.0, 1.0, 1.0, 9.0))
        found = best_draft_lengths(np.array([1.0, 0.2]), np.array([0.5, 0.95]), cost, 1)
        assert found == [0, 1], f"0.2 tokens of width are free, and give 0.19; a whole one costs a second: not {found}"

    def test_a_draft_that_never_comes_is_none(self) -> None:
        found = best_draft_lengths(np.zeros(2), np.full(2, 0.9), FLAT, 8)
        assert found == [0, 0], "nobody has a draft, so there is nothing to ask for"

    def test_a_gain_below_the_margin_is_none(self) -> None:
        cost = costs((1.0, 2.0), (1.0, 1.25))
        found = [best_draft_lengths(np.ones(1), np.array([0.5]), cost, 2, m) for m in (1.19, 1.21)]
        assert found == [[1], [0]], "one draft token is 1.2 times as fast as none"

    @pytest.mark.parametrize(("seconds", "margin"), [(1.0, 1.5), (1.5, 1.0)])
    def test_a_gain_of_exactly_the_margin_is_none(self, seconds: float, margin: float) -> None:
        """One draft token makes 1.5 tokens, and all numbers here are exact in binary."""
        cost = costs((1.0, 2.0), (1.0, seconds))
        found = best_draft_lengths(np.ones(1), np.array([0.5]), cost, 1, margin)
        says = f"1.5 tokens in {seconds} s are exactly {margin} times as fast as one a second: it must be more"
        assert found == [0], f"{says}: [0], not {found}"

    def test_a_draft_model_writes_as_far_as_the_longest_draft(self) -> None:
        """Both draft tokens of the first sequence are worth most, so one more of the second takes no more steps of the draft model."""
        found = depths(0.9, 0.4, cost=costs((1.0, 2.0), (1.0, 1.05), per_draft_token=0.3), most=2)
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
            seconds = plain = cost.of_plain(len(rows))
            if any(chosen):
                seconds = silent * plain + some * cost.of_verifying(len(rows) + width / some) + wait
            return tokens / seconds

        found = best_draft_lengths(hits, acceptances, cost, 3)
        best = max(product(range(4), repeat=len(rows)), key=speed)
        assert speed(tuple(found)) >= speed(best) - 1e-9, (
            f"{found} gives {speed(tuple(found)):.3f} tokens a second, {list(best)} gives {speed(best):.3f}"
        )


class TestCurve:
    def test_between_and_behind_the_table(self) -> None:
        curve, at = Curve((1.0, 3.0, 5.0), (1.0, 2.0, 6.0)), np.array([0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0])
        assert curve.at(at) == pytest.approx([1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 10.0])
        assert [Curve((2.0,), (3.0,)).at(n) for n in (1.0, 5.0)] == [3.0, 3.0], "one point: no slope"
