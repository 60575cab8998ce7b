"""The policy by itself: averages, probes, rests, and what steps are charged with. In an engine: `test_never_loses`, `test_draft_sits_out`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from folovllm.spec_decode.choose import Curve, StepCost
from folovllm.spec_decode.policy import (
    Acceptance,
    AdaptiveLength,
    LengthPolicy,
    TimedSteps,
)
from folovllm.spec_decode.proposer import Proposer, RowState
from folovllm.step.schedule import TokenIds
from tests.sequences import make_seq
from tests.x3.drafting_loop import Clock, small_scheduler
from tests.x3.test_choose import FLAT, costs


def test_averages_follow_the_text() -> None:
    known = Acceptance(1.0, 0.0, 0.5, 0.5)
    for _ in range(30):
        known.update(4, 4, 0.9)
    assert known.rate > 0.95
    for _ in range(30):
        known.update(4, 0, 0.9)
    assert known.rate < 0.2
    for _ in range(20_000):
        known.update(0, 0, 0.9)
    assert known.rate < 0.2, "silence says nothing of the drafts there were"
    assert known.hit < 0.01


def step(num_draft_tokens: int, num_accepted: int, seconds: float = 1.0) -> TimedSteps:
    return TimedSteps(seconds, 1, 1, num_draft_tokens, num_accepted, 4, 0.0, True)


def rests(policy: AdaptiveLength, lost: float) -> Iterator[int]:
    """The rests of a policy, each behind a probe that has no draft and takes so many seconds more than a plain step."""
    while True:
        assert policy.lengths([0]) == [0]
        yield policy.rest
        assert policy.lengths([0]) == [4], "behind a rest comes a probe"
        policy.observe(0, 0, 0)
        policy.observe_steps(step(0, 0)._replace(proposing=lost, seconds=1.0 + lost))


def test_rests_grow_until_probes_take_a_small_share_of_the_time() -> None:
    found = rests(AdaptiveLength(costs((1.0,), (1.0,)), 8), lost=1.0)
    assert [next(found) for _ in range(6)] == [8, 32, 128, 200, 200, 200], "a step of 200 is half a per cent"


def test_a_probe_that_takes_very_long_is_earned_before_the_next() -> None:
    found = rests(AdaptiveLength(costs((1.0,), (1.0,)), 8), lost=20.0)
    assert [next(found) for _ in range(2)] == [8, 800], "4 steps more than the 16 that may be lost"
    found = rests(AdaptiveLength(costs((1.0,), (1.0,)), 8), lost=1e9)
    assert [next(found) for _ in range(2)] == [8, AdaptiveLength.AT_MOST], "an interrupted one silences nobody for ever"


def test_what_drafts_have_won_may_be_lost_again() -> None:
    policy = AdaptiveLength(costs((1.0,), (1.0,)), 8)
    for _ in range(8):
        policy.observe_steps(step(4, 4))
    for _ in range(15):
        policy.observe_steps(step(0, 0, seconds=2.0))
    policy.lengths([0])
    assert policy.may_wake and policy.rest == 8
    policy.observe_steps(step(0, 0, seconds=30.0))
    policy.lengths([0])
    policy.lengths([0])
    assert not policy.may_wake, "no more than 16 steps are saved"


def test_of_constrained_sequences_all_have_averages_of_their_own() -> None:
    policy = AdaptiveLength(FLAT, 8)
    policy.constrain(1)
    for _ in range(20):
        policy.observe(1, 4, 4)
    policy.constrain(2)
    assert policy.acceptance(2).hit > 0.9 and policy.acceptance(3).hit == 0


def test_a_step_with_a_draft_model_is_charged_without_what_drafting_takes() -> None:
    cost = costs((1.0, 9.0), (1.0, 1.0), per_draft_token=0.2)
    cost.first_draft_token = 0.1
    policy = AdaptiveLength(cost, 8)
    for _ in range(60):
        policy.observe_steps(step(4, 4, seconds=2.2))
    assert (cost.first_draft_token, cost.per_draft_token) == (0.1, 0.2), "as measured"
    assert cost.of_speculative(np.array([5.0]), np.array([4]), np.array([1.0])) == pytest.approx(2.2, rel=0.01)


def test_a_step_in_which_the_proposer_read_a_text_says_nothing_of_others() -> None:
    policy = AdaptiveLength(costs((1.0, 9.0), (1.0, 1.0)), 8)
    policy.observe_steps(step(4, 4, seconds=9.0)._replace(is_typical=False))
    assert policy.cost.verifying_more == 0.0


def test_a_rest_says_what_plain_steps_take() -> None:
    policy = AdaptiveLength(costs((1.0, 9.0), (1.0, 1.0)), 8)
    for _ in range(20):
        policy.observe_steps(TimedSteps(24.0, 8, 1, 0, 0, 0, 0.0, True))
    assert policy.cost.of_plain(1) == pytest.approx(3.0, rel=0.01)


def test_certain_tokens_are_verified_where_the_step_is_worth_it() -> None:
    policy = AdaptiveLength(StepCost(Curve((1.0, 16.0), (1.0, 2.0)), Curve((1.0, 16.0, 32.0), (2.0, 3.0, 3.2))), 8)
    assert not policy.pays(1, 1) and policy.pays(1, 4)
    assert not policy.pays(16, 4) and policy.pays(16, 16)


class Never(LengthPolicy):
    """Wants no drafts."""

    rest = 64

    def lengths(self, seq_ids: Sequence[int]) -> list[int]:
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
    scheduler = small_scheduler(proposer, Never())
    seqs = [make_seq(3, max_tokens=n) for n in (3, 5, 20)]
    for seq in seqs:
        scheduler.add(seq)
    for token in range(8):
        running = scheduler.sequences(scheduler.schedule())
        scheduler.postprocess([(seq, [token]) for seq in running])
    scheduler.abort(seqs[2])
    assert proposer.heard == [[0, 1, 2], [0, 1, 2, 3, 4]]


class Listening(Never):
    """Notes what steps took."""

    rest = 8

    def __init__(self) -> None:
        self.heard: list[TimedSteps] = []

    def observe_steps(self, steps: TimedSteps) -> None:
        self.heard.append(steps)


def test_time_without_work_is_no_steps() -> None:
    policy, clock = Listening(), Clock()
    scheduler = small_scheduler(Remembers(), policy, clock=clock)
    for _ in range(3):
        clock.now += 1000.0  # nobody is there
        scheduler.add(make_seq(3, max_tokens=30))
        for _ in range(30):
            clock.now += 1.0
            scheduler.postprocess([(seq, [1]) for seq in scheduler.sequences(scheduler.schedule())])
        assert not scheduler.schedule().scheduled_seqs
    assert len(policy.heard) > 4 and all(steps.seconds == steps.num_steps for steps in policy.heard)
