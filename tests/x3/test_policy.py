"""The policy by itself: averages, probes, rests, and what steps are charged with. In an engine: `test_two_percent`."""

from itertools import product
from random import Random

import pytest

from folovllm.electives.spec_decode.choose import Curve, StepCost
from folovllm.electives.spec_decode.policy import TRUSTED, UNKNOWN, Acceptance, AdaptiveLength
from tests.x3.test_choose import costs


def test_averages_follow_the_text() -> None:
    known = Acceptance(1.0, 0.5)
    for accepted, low, high in ((4, 0.95, 1.0), (0, 0.0, 0.2)):
        for _ in range(30):
            known.update(4, accepted)
        assert low <= known.rate <= high and known.hit == pytest.approx(1)
    for _ in range(20_000):
        known.update(0, 0)
    assert known.rate < 0.2, "silence says nothing of the drafts there were"
    assert known.hit < 0.01


def test_an_average_is_of_the_tokens_that_were_judged() -> None:
    """Behind a rejected token nothing is known; so drafts of any length lead to the chance of a token."""
    known, rng, found = Acceptance(1.0, 0.5), Random(1), []
    for _ in range(4000):
        known.update(5, next((i for i in range(5) if rng.random() >= 0.7), 5))
        found.append(known.rate)
    assert sum(found) / len(found) == pytest.approx(0.7, abs=0.06)


def policy_of() -> AdaptiveLength:
    """A policy for one sequence; each step takes a second, whatever it verifies."""
    return AdaptiveLength(costs((1.0, 9.0), (1.0, 1.0)), 8)


def probe(policy: AdaptiveLength, seconds: float) -> int:
    """The rest behind a probe that has no draft and takes so many seconds."""
    assert policy.lengths([0]) == [4], "behind a rest comes a probe"
    policy.observe_drafting(1, 4, 0, seconds)
    policy.observe(0, 0, 0)
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
        policy.observe_drafting(1, 4, 4, 0.0)
        policy.observe(0, 4, 4)
    for _ in range(100):  # until the averages have forgotten
        policy.observe(0, 0, 0)
    assert probe(policy, 7.0) == 8, "of 32 steps 8 are kept, at most"
    assert probe(policy, 2.0) == 100, "one of the 8 was left"


@pytest.mark.parametrize("asking", [0.0, 0.5])
@pytest.mark.parametrize("wait", [0.1, 1.5])
@pytest.mark.parametrize("num_seqs", [1, 8])
@pytest.mark.parametrize("first", [UNKNOWN, TRUSTED], ids=["lookup", "draft model"])
def test_under_two_percent_are_lost(first: Acceptance, num_seqs: int, wait: float, asking: float) -> None:
    """Costs and acceptance are given, and nothing is timed."""
    for hit, rate in product((0.02, 0.3, 1.0), (0.0, 0.5, 0.8, 0.95)):
        cost = StepCost(Curve((1, 16, 64), (1.0, 1.6, 3.0)), wait, 0.0, asking if first is TRUSTED else 0.0)
        policy, rng = AdaptiveLength(cost, 8, first), Random(1)
        tokens, seconds, plain = 0, 0.0, cost.of_plain(num_seqs)
        while tokens < 4_000 * num_seqs:
            lengths = policy.lengths(range(num_seqs))
            tokens, seconds = tokens + num_seqs, seconds + plain
            if not any(lengths):
                tokens, seconds = tokens + num_seqs * policy.rest, seconds + plain * policy.rest
                continue
            drafts = [k * (rng.random() < hit) for k in lengths]
            if width := sum(drafts):
                seconds += cost.of_verifying(num_seqs + width) - plain
            policy.observe_drafting(num_seqs, max(lengths), width, asking)
            seconds += asking
            for seq_id, (k, draft) in enumerate(zip(lengths, drafts, strict=True)):
                if k:
                    accepted = next((i for i in range(draft) if rng.random() >= rate), draft)
                    policy.observe(seq_id, draft, accepted)
                    tokens += accepted
        slack = policy.SLACK * plain + wait + asking + 4 * cost.of_plain(64)  # once, for all steps to come
        assert seconds < 1.02 * plain * tokens / num_seqs + slack, f"hit {hit}, rate {rate}"


def test_the_next_sequence_begins_with_the_average_of_all() -> None:
    policy = policy_of()
    for _ in range(40):
        policy.observe(1, 4, 4)
    assert policy.lengths([2]) == [8]


def test_certain_tokens_are_verified_where_the_step_is_worth_it() -> None:
    policy = AdaptiveLength(StepCost(Curve((1.0, 16.0, 32.0), (1.0, 2.0, 2.2)), 1.0), 8)
    assert not policy.pays(1, 1) and policy.pays(1, 4)
    assert not policy.pays(16, 4) and policy.pays(16, 16)
