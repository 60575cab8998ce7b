"""A scheduler: the engine can compute what it decides, the cache is given back, and everybody is served in the end."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from folovllm.cache.slot_manager import SlotManager
from folovllm.engine.scheduler import whole_prompt
from folovllm.request import Sequence, SequenceStatus
from tests.builders.engines import assert_same_tokens
from tests.sequences import EOS, make_seq

LATE = 100  # so many that came later may come in before a request, and no more


def chunk(seq: Sequence, budget: int) -> int:
    """As M5's, which is an exercise of a later milestone: in mine/ it is a stub."""
    return min(seq.num_uncomputed_tokens, budget)


class Bench:
    """A scheduler over slots, and a device that draws the token 40 + position."""

    def __init__(
        self, component: Any, slots: int = 4, seats: int = 4, budget: int = 40, tokens: Any = whole_prompt
    ) -> None:
        self.kv = SlotManager(slots, 64)
        self.scheduler = component(self.kv, seats, budget, tokens)
        self.seats, self.budget = seats, budget
        self.seqs: list[Sequence] = []
        self.started: list[Sequence] = []  # in the order in which they came in
        self.computed: dict[Sequence, int] = {}

    def add(self, prompt: int, answer: int, **params: Any) -> Sequence:
        seq = make_seq(prompt, answer, name=f"r{len(self.seqs)}", ignore_eos=True, **params)
        self.seqs.append(seq)
        self.scheduler.add(seq)
        return seq

    def unfinished(self) -> list[Sequence]:
        return [seq for seq in self.seqs if not seq.status.is_finished]

    def step(self) -> list[Sequence]:
        """Decide, check that it can be computed, draw, and hand in. Returns whose the shares were."""
        output = self.scheduler.schedule()
        seqs = self.scheduler.sequences(output)
        assert bool(seqs) == bool(self.unfinished()), "a step has shares as long as anybody has work"
        assert len(set(seqs)) == len(seqs) <= self.seats, "each sequence has one share, and max_num_seqs is the most"
        assert output.num_tokens <= self.budget, "a step computes max_num_batched_tokens at most"
        self.check_order([scheduled.num_new_tokens for scheduled in output.scheduled_seqs], seqs)
        for scheduled, seq in zip(output.scheduled_seqs, seqs, strict=True):
            assert scheduled.start == self.computed.get(seq, 0), f"{seq.request_id} goes on where it was"
            assert seq.status is SequenceStatus.RUNNING and seq in self.scheduler.running, "who has a share runs"
            assert seq.block_table, "who has a share has reserved its cache"
            self.computed[seq] = scheduled.end
            self.started += [seq] * (seq not in self.started)
        self.check()
        draws = [
            [40 + seq.num_tokens] if scheduled.num_samples else []
            for scheduled, seq in zip(output.scheduled_seqs, seqs, strict=True)
        ]
        outputs = self.scheduler.postprocess(list(zip(seqs, draws, strict=True)))
        expected = [
            (seq, drawn, seq.status if seq.status.is_finished else None)
            for seq, drawn in zip(seqs, draws, strict=True)
            if drawn
        ]
        assert list(outputs) == expected, "who got a token is returned, with the token and how it ended"
        self.check()
        return seqs

    def check_order(self, counts: list[int], seqs: list[Sequence]) -> None:
        assert all(not (a > 1 and b == 1) for a, b in pairwise(counts)), "decodes, of one token, come first in a step"

    def check(self) -> None:
        running, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        assert len(running) <= self.seats, "no more than max_num_seqs run"
        together = sorted(seq.seq_id for seq in [*running, *waiting])
        assert together == sorted(seq.seq_id for seq in self.unfinished()), (
            "each unfinished one waits or runs, not both"
        )
        assert all(seq.status is SequenceStatus.RUNNING for seq in running), "who runs has the status RUNNING"
        assert all(seq.status is SequenceStatus.WAITING and not seq.block_table for seq in waiting), (
            "who waits holds nothing"
        )
        held = sum(bool(seq.block_table) for seq in self.seqs)
        assert held == self.kv.num_blocks - self.kv.num_free, "a block is given back when its sequence ends"
        assert held == sum(bool(seq.block_table) for seq in running), "only running sequences hold a block"

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.unfinished():
                break
            self.step()
        assert not self.unfinished(), "everybody is served in the end"
        for seq in self.seqs:
            if seq.status is not SequenceStatus.FINISHED_ABORTED:
                tokens = [40 + p for p in range(seq.num_prompt_tokens, seq.num_tokens)]
                assert seq.output_token_ids.tolist() == tokens, (
                    f"{seq.request_id} got the tokens drawn for it, in order"
                )
                assert seq.num_output_tokens == seq.max_tokens, f"{seq.request_id} got as many as it asked for"


def test_a_worked_case(component: Any) -> None:
    """Prompts of 3 and 4 tokens, answers of 2 and 1: 7 tokens in the first step, 1 in the second, and then none."""
    bench = Bench(component)
    first, second = bench.add(3, 2), bench.add(4, 1)
    output = bench.scheduler.schedule()
    assert output.num_tokens == 7, "both prompts fit into the first step"
    seqs = bench.scheduler.sequences(output)
    bench.scheduler.postprocess([(seq, [50]) for seq in seqs])
    assert second.status is SequenceStatus.FINISHED_LENGTH, "the second has its one token, and is over at once"
    assert list(bench.scheduler.running) == [first] and bench.kv.num_free == 3, "it has left, and its block is free"
    output = bench.scheduler.schedule()
    assert [(s.start, s.num_new_tokens) for s in output.scheduled_seqs] == [(3, 1)], "the first decodes its new token"
    bench.scheduler.postprocess([(first, [51])])
    assert first.output_token_ids.tolist() == [50, 51] and not bench.scheduler.schedule().scheduled_seqs, (
        "nothing is left"
    )


def test_a_newcomer_joins_at_once(component: Any) -> None:
    bench = Bench(component)
    bench.add(3, 10)
    bench.step()
    late = bench.add(5, 2)
    assert late in bench.step(), "there is room: it does not wait for the others to end"


def test_who_ends_makes_room_in_the_next_step(component: Any) -> None:
    bench = Bench(component, seats=1)
    bench.add(3, 1)
    second = bench.add(3, 1)
    bench.step()
    assert second in bench.step(), "the row and the block are free in the very next step"


def test_fewer_slots_than_seats(component: Any) -> None:
    bench = Bench(component, slots=2, seats=4)
    for _ in range(5):
        bench.add(6, 3)
    bench.run()


def test_a_stop_token_ends_the_answer(component: Any) -> None:
    bench = Bench(component)
    seq = make_seq(3, 9)
    bench.seqs.append(seq)
    bench.scheduler.add(seq)
    bench.scheduler.schedule()
    bench.scheduler.postprocess([(seq, [EOS])])
    assert seq.status is SequenceStatus.FINISHED_STOPPED, "check_stop_conditions is asked after each token"
    assert seq.detokenizer.text != "" or seq.num_output_tokens == 1, "the token was appended"
    bench.check()


def test_prompts_in_chunks(component: Any) -> None:
    """A prompt longer than the budget: with `chunk` it takes several steps, and draws only at its end."""
    bench = Bench(component, budget=10, tokens=chunk)
    long = bench.add(35, 2)
    bench.add(3, 8)
    bench.run()
    assert bench.computed[long] == 36, "all 35 tokens of the prompt and the first of the answer were computed"


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_abort(component: Any, when: str) -> None:
    bench = Bench(component, seats=2)
    seqs = [bench.add(4, 6) for _ in range(4)]
    bench.step()
    victims = [seq for seq in seqs if (seq in bench.scheduler.running) is (when == "running")]
    assert len(victims) == 2, "two rows, four requests"
    bench.scheduler.abort(*victims)
    assert all(seq.status is SequenceStatus.FINISHED_ABORTED for seq in victims), "who is aborted has that status"
    bench.check()
    bench.run()


def test_nobody_is_overtaken_for_ever(component: Any) -> None:
    """A long prompt waits while short ones keep coming; and the other way round."""
    for own, others in ((30, 2), (2, 30)):
        bench = Bench(component, seats=2, budget=32)
        for _ in range(4):
            bench.add(others, 2)
        victim = bench.add(own, 2)
        for _ in range(20 * LATE):
            bench.add(others, 2)
            bench.step()
            if victim in bench.started:
                break
        assert victim in bench.started, "it comes in at some time"
        before = bench.started[: bench.started.index(victim)]  # without those that came in behind it, in the same step
        later = sum(seq.seq_id > victim.seq_id for seq in before)
        assert later <= LATE, f"{later} later ones came in before a request; {LATE} at most may"


requests = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(
    requests=requests,
    slots=st.integers(1, 5),
    seats=st.integers(1, 5),
    budget=st.integers(30, 60),
    chunks=st.booleans(),
)
def test_any_order_of_arrivals(
    component: Any, requests: list[tuple[int, int, int]], slots: int, seats: int, budget: int, chunks: bool
) -> None:
    bench = Bench(component, slots, seats, budget, chunk if chunks else whole_prompt)
    for prompt, answer, pause in requests:
        bench.add(prompt, answer)
        for _ in range(pause):
            if bench.unfinished():
                bench.step()
    bench.run()


def test_in_the_engine(component: Any) -> None:
    assert_same_tokens("scheduler", milestone="m2", max_num_seqs=2)
