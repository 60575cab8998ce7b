"""What may be lost on tries, in virtual time; and what becomes of those about whom nobody asked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from folovllm.cache.block_manager import BlockManager
from folovllm.engine.scheduler import chunk, preempt
from folovllm.engine.speculation import Speculation
from folovllm.engine.speculative_scheduler import SpeculativeScheduler
from folovllm.spec.budget import Budget
from folovllm.spec.proposer import Depth, Proposer, RowState
from folovllm.step.draw import TokenIds
from tests.sequences import make_seq
from tests.x3.guessing_loop import Clock, NoForms


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
