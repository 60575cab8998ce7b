"""The policy by itself: averages, probes, rests, and what steps are charged with. In an engine: `test_two_percent`, `test_draft_sits_out`."""

from collections.abc import Sequence
from itertools import product
from random import Random

import pytest

from folovllm.electives.spec_decode.choose import Curve, StepCost
from folovllm.electives.spec_decode.policy import TRUSTED, UNKNOWN, Acceptance, AdaptiveLength, LengthPolicy
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
    policy.observe_drafting(1, 4, 0, seconds)
    policy.observe(0, 0, 0)
    assert policy.lengths([0]) == [0]
    return policy.rest


@pytest.mark.parametrize(("seconds", "rest"), [(0.01, 8), (1.0, 100), (20.0, 2000), (1e9, AdaptiveLength.LONGEST)])
def test_a_rest_takes_a_hundred_times_as_long_as_what_was_lost(seconds: float, rest: int) -> None:
    policy = policy_of()
    assert policy.lengths([0]) == [0] and policy.rest == 8
    assert [probe(policy, seconds) for _ in range(3)] == [rest] * 3


def test_a_head_that_is_never_right_is_asked_less_and_less_and_comes_back() -> None:
    """Its step costs twice as much: 1% is lost at first, and an eighth of that later."""
    policy = AdaptiveLength(StepCost(Curve((1.0, 64.0), (1.0, 1.0)), 1.0), 3, TRUSTED)

    def step(accepted: int) -> bool:
        """Draft, if the policy wants that; return whether it does."""
        if length := policy.lengths([0])[0]:
            policy.observe_drafting(1, length, length, 0.0)
            policy.observe(0, length, min(accepted, length))
        return length > 0

    def rest_behind(accepted: int) -> int:
        while step(accepted):
            pass
        return policy.rest

    assert rest_behind(0) == 8, "plain steps are timed before the first draft"
    assert rest_behind(0) > 200, "what the first drafts lost, which were trusted"
    assert [rest_behind(0) for _ in range(5)] == [200, 400, 800, 800, 800]
    assert rest_behind(3) == 8, "what was won pays for the next probe"
    assert [step(3) for _ in range(16)][8:] == [True] * 8


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
    for _ in range(200):
        policy.observe(1, 4, 4)
    assert policy.acceptance(2).hit > 0.8 and policy.acceptance(2).rate > 0.9


def test_certain_tokens_are_verified_where_the_step_is_worth_it() -> None:
    policy = AdaptiveLength(StepCost(Curve((1.0, 16.0, 32.0), (1.0, 2.0, 2.2)), 1.0), 8)
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
