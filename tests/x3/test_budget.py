"""What may be lost on tries, in virtual time; and what becomes of those about whom nobody asked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from folovllm.cache.block_manager import BlockManager
from folovllm.engine.scheduler import chunk, preempt
from folovllm.spec_decode.adaptive import AdaptiveDepth
from folovllm.spec_decode.budget import Budget
from folovllm.spec_decode.choose import Curve, StepCost
from folovllm.spec_decode.proposer import Depth, Proposer, RowState
from folovllm.spec_decode.scheduler import SpeculativeScheduler
from folovllm.spec_decode.speculation import Speculation
from folovllm.step.draw import TokenIds
from folovllm.structured_outputs import StructuredOutputsParams
from tests.sequences import make_seq
from tests.x3.guessing_loop import Clock, NoForms, sequence


def test_it_grows_with_time_and_is_never_more_than_at_the_start() -> None:
    budget = Budget(2.0, clock := Clock())
    budget.pay(5.0)
    assert budget.left() == -3.0
    clock.now += 400.0
    assert budget.left() == pytest.approx(-1.0), "half a hundredth of the time"
    clock.now += 10_000.0
    assert budget.left() == 2.0
    budget.pay(-7.0)
    assert budget.left() == 2.0, "what was won is not saved up, either"
    budget.pay(1.0)
    assert budget.left() == 1.0


def test_a_loan_is_given_once() -> None:
    for loan, most in ((1.0, 4.0), (4.0, 1.0)):
        budget = Budget(most, clock := Clock(), loan)
        assert budget.left() == loan
        clock.now += 10_000.0
        assert budget.left() == 4.0, "time adds to it as far as may be saved, and takes nothing away"
        budget.pay(3.5)
        clock.now += 10_000.0
        assert budget.left() == most


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 3)), max_size=60))
def test_tries_lose_no_more_than_a_share_of_the_time_and_the_last_of_them(steps: list[tuple[float, float]]) -> None:
    budget, lost, longest = Budget(1.0, clock := Clock()), 0.0, 0.0
    for seconds, price in steps:
        clock.now += seconds
        if budget.left() > 0:
            clock.now += price
            budget.pay(price)
            lost, longest = lost + price, max(longest, price)
    assert lost <= 1.0 + Budget.SHARE * clock.now + longest + 1e-9


class Never(Depth):
    """Wants no guesses."""

    def choose(self, seq_ids: Sequence[int]) -> list[int]:
        self.rest = 64
        return [0] * len(seq_ids)


class Remembers(Proposer):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []

    def admit(self, state: RowState) -> None:
        raise AssertionError("nobody asked")

    def propose(self, state: RowState, k: int) -> list[int]:
        raise AssertionError("nobody asked")

    def remember(self, answer: TokenIds, cache_salt: str | None) -> None:
        self.heard.append(answer.tolist())


def test_who_ends_unasked_is_remembered_and_who_is_aborted_is_not() -> None:
    proposer = Remembers()
    scheduler = SpeculativeScheduler(
        kv=BlockManager(64, 4), max_num_seqs=4, max_num_batched_tokens=64, tokens_of_step=chunk, make_room=preempt,
        speculation=Speculation(proposer, Never(), NoForms()),
    )  # fmt: skip
    seqs = [make_seq(3, max_tokens=n) for n in (3, 5, 20)]
    for seq in seqs:
        scheduler.add(seq)
    for step in range(8):
        running = scheduler.sequences(scheduler.schedule())
        scheduler.postprocess([(seq, [step]) for seq in running])
    scheduler.abort(seqs[2])
    assert proposer.heard == [[0, 1, 2], [0, 1, 2, 3, 4]]


def test_time_without_work_fills_no_budget() -> None:
    """Between two requests nothing can be lost, so nothing may be lost for it later."""
    budget = Budget(1.0, clock := Clock())
    scheduler = SpeculativeScheduler(
        kv=BlockManager(64, 4), max_num_seqs=4, max_num_batched_tokens=64, tokens_of_step=chunk, make_room=preempt,
        speculation=Speculation(Remembers(), Never(), NoForms(), clock, budget),
    )  # fmt: skip
    budget.pay(2.0)
    for _ in range(3):
        clock.now += 1000.0  # nobody is there
        scheduler.add(make_seq(3, max_tokens=2))
        for _ in range(2):
            clock.now += 10.0
            scheduler.postprocess([(seq, [1]) for seq in scheduler.sequences(scheduler.schedule())])
    clock.now += 1000.0
    scheduler.speculation.resume()
    assert budget.left() == pytest.approx(-1.0 + Budget.SHARE * 60.0)


def test_a_choice_is_paid_for_and_nobody_chooses_again_before_it_is_earned() -> None:
    budget = Budget(1.0, Clock())
    cost = StepCost(Curve((1.0,), (0.5,)), Curve((1.0,), (1.0,)))
    depth = AdaptiveDepth(cost, 4, budget)
    assert depth.choose([0]) == [0]
    rest = depth.rest
    depth.observe_choice(1, 0.25)
    assert (budget.left(), depth.rest) == (0.5, rest), "a choice, and as much for the steps that are timed around it"
    depth.observe_choice(1, 0.3)
    assert budget.left() == pytest.approx(-0.1)
    assert depth.rest == round(0.7 / (Budget.SHARE * 0.5)), "what is owed, and the price of the next one"
    depth.observe_choice(1, 30.0)
    assert depth.rest == AdaptiveDepth.IN_DEBT, "an interrupted one silences nobody for long"


def test_a_decision_for_nobody_holds_for_one_rest() -> None:
    """Else eight rests would pass, the longest of 64 steps, before anybody looks at what is known by then."""
    cost = StepCost(Curve((1.0, 8.0), (1.0, 1.1)), Curve((1.0, 8.0), (1.6, 1.8)))
    depth = AdaptiveDepth(cost, 4, Budget(1.0, Clock()))
    for _ in range(8):
        depth.observe(0, 4, 2)
        depth.observe(1, 4, 0)
    assert depth.choose([0, 1]) == [0, 0], "it is not certain that guesses do not pay, and they do not"
    for _ in range(8):
        depth.observe(0, 4, 4)
    assert depth.choose([0, 1])[0] == 4


@pytest.mark.parametrize(("has_form", "left"), [(True, 0.0), (False, -3.0)])
def test_no_debt_stops_an_answer_with_a_form_so_it_makes_none(has_form: bool, left: float) -> None:
    """It goes on as long as it is thought to pay: a row of steps in vain must not silence others. What it wins is saved."""
    budget = Budget(1.0, Clock())
    cost = StepCost(Curve((1.0,), (0.5,)), Curve((1.0,), (0.6,)), wait=0.5)
    depth = AdaptiveDepth(cost, 4, budget)
    if has_form:
        depth.note_form(0)
    for _ in range(8):
        depth.observe(0, 4, 4)
    assert depth.choose([0]) == [4]
    for _ in range(8):
        depth.observe_step(1, 1, 0, 0, cost.of_vain(1), asked=True)
    assert budget.left() == pytest.approx(left)
    depth.observe_step(1, 5, 4, 4, 0.6, asked=True)
    assert budget.left() == pytest.approx(min(1.0, left + 4 * 0.5 - 0.1))


class Nothing(AdaptiveDepth):
    """Finds out, each time, that nobody gets guesses; that takes as long as a thousand steps."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.asked = clock, 0
        super().__init__(StepCost(Curve((1.0,), (1.0,)), Curve((1.0,), (9.0,))), 4, Budget(1.0, clock))

    def choose(self, seq_ids: Sequence[int]) -> list[int]:
        self.asked += 1
        self.clock.now += 1000.0
        return super().choose(seq_ids)


@pytest.mark.parametrize(("has_form", "asked"), [(False, 2), (True, 400 // AdaptiveDepth.LONGEST)])
def test_no_debt_lets_an_answer_with_a_form_sleep(has_form: bool, asked: int) -> None:
    depth = Nothing(clock := Clock())
    scheduler = SpeculativeScheduler(
        kv=BlockManager(128, 4), max_num_seqs=4, max_num_batched_tokens=64, tokens_of_step=chunk, make_room=preempt,
        speculation=Speculation(Remembers(), depth, NoForms(), clock),
    )  # fmt: skip
    form = StructuredOutputsParams(regex=".*") if has_form else None
    scheduler.add(sequence([1, 2, 3], 400, structured_outputs=form))
    for _ in range(400):
        clock.now += 1.0
        scheduler.postprocess([(seq, [1]) for seq in scheduler.sequences(scheduler.schedule())])
    assert depth.asked >= asked if has_form else depth.asked <= asked
