"""The policy by itself: averages, probes, rests, and what steps are charged with. In an engine: `test_two_percent`, `test_draft_sits_out`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from folovllm.electives.spec_decode.choose import Curve, StepCost
from folovllm.electives.spec_decode.policy import (
    Acceptance,
    AdaptiveLength,
    LengthPolicy,
)
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.step.schedule import TokenIds
from tests.sequences import make_seq
from tests.x3.drafting_loop import small_scheduler
from tests.x3.test_choose import costs


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


def policy_of() -> AdaptiveLength:
    """A policy for one sequence; each step takes a second, whatever it verifies."""
    return AdaptiveLength(costs((1.0, 9.0), (1.0, 1.0)), 8)


def probe(policy: AdaptiveLength, seconds: float) -> int:
    """The rest behind a probe that has no draft and takes so many seconds."""
    assert policy.lengths([0]) == [4], "behind a rest comes a probe"
    policy.observe(0, 0, 0)
    policy.observe_asked(1, [4], 0, seconds)
    assert policy.lengths([0]) == [0]
    return policy.rest


@pytest.mark.parametrize(("seconds", "rest"), [(0.01, 8), (1.0, 100), (20.0, 2000), (1e9, AdaptiveLength.LONGEST)])
def test_a_rest_takes_a_hundred_times_as_long_as_what_was_lost(seconds: float, rest: int) -> None:
    policy = policy_of()
    assert policy.lengths([0]) == [0] and policy.rest == 8
    assert [probe(policy, seconds) for _ in range(3)] == [rest] * 3


def test_what_drafts_have_won_may_be_lost_again() -> None:
    policy = policy_of()
    assert policy.lengths([0]) == [0]
    for _ in range(8):
        policy.observe_asked(1, [4], 4, 0.0)
        policy.observe(0, 4, 4)
    for _ in range(100):  # until the averages have forgotten
        policy.observe(0, 0, 0)
    assert probe(policy, 15.0) == 8, "of 32 steps 16 are saved, at most"
    assert probe(policy, 2.0) == 100, "one of the 16 was left"


def test_the_next_sequence_begins_with_the_average_of_all() -> None:
    policy = policy_of()
    for _ in range(200):
        policy.observe(1, 4, 4)
    assert policy.acceptance(2).hit > 0.8 and policy.acceptance(2).rate > 0.9


def test_a_lookup_that_takes_long_on_the_host_is_asked_less() -> None:
    lengths = {}
    for seconds in (0.01, 9.0):
        policy = policy_of()
        for _ in range(60):
            policy.observe(0, 4, 4)
            policy.observe_asked(1, [4], 4, seconds)
        lengths[seconds] = policy.lengths([0])
    assert lengths == {0.01: [8], 9.0: [0]}


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
