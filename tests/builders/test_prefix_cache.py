"""A prefix cache: what was computed is found again, and a block is only ever served for the tokens it was computed from."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from folovllm.engine.scheduler import Scheduler, chunk, preempt
from folovllm.request import Sequence, SequenceStatus
from tests.builders.engines import assert_same_tokens, texts
from tests.sequences import make_seq as sequence


class Bench:
    """A cache, and a device that remembers for each place the whole prefix that its K/V was computed from, and whose it is."""

    def __init__(self, component: Any, num_blocks: int = 12, block_size: int = 2) -> None:
        self.kv = component(num_blocks, block_size)
        self.written: dict[int, tuple[Any, ...]] = {}  # slot: salt and prefix
        self.running: list[Sequence] = []

    def admit(self, seq: Sequence, count: int | None = None) -> bool:
        """Match and reserve as the scheduler does, then compute `count` tokens, or all."""
        self.kv.get_computed_blocks(seq)
        assert seq.num_computed_tokens == len(seq.block_table) * self.kv.block_size, (
            "what is matched counts as computed"
        )
        assert seq.num_uncomputed_tokens >= 1, "one token is left to compute: its logits give the next one"
        self.check(seq)
        count = seq.num_uncomputed_tokens if count is None else min(count, seq.num_uncomputed_tokens)
        if not self.kv.allocate_slots(seq, count):
            self.kv.free(seq)
            assert (seq.block_table, seq.num_computed_tokens) == ([], 0), "who is not admitted holds and has nothing"
            return False
        seq.start()
        self.running.append(seq)
        self.compute(seq, count)
        return True

    def compute(self, seq: Sequence, count: int) -> None:
        """Write the K/V of the next tokens, then publish. No place that another one reads is written."""
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + count
        slots = self.kv.slots(seq.block_table, self.kv.block_size, start, end)
        self.written |= {int(s): self.prefix(seq, p) for s, p in zip(slots, range(start, end), strict=True)}
        seq.num_computed_tokens = end
        for other in self.running:
            self.check(other)
        self.kv.cache_blocks(seq)

    @staticmethod
    def prefix(seq: Sequence, position: int) -> tuple[Any, ...]:
        return seq.request.cache_salt, *seq.token_ids[: position + 1].tolist()

    def check(self, seq: Sequence) -> None:
        slots = self.kv.slots(seq.block_table, self.kv.block_size, 0, seq.num_computed_tokens)
        for position, slot in enumerate(slots.tolist()):
            own = self.prefix(seq, position)
            assert self.written.get(slot) == own, (
                f"{seq} reads the K/V of other tokens, or of another tenant, at {position}"
            )

    def end(self, seq: Sequence) -> None:
        self.running.remove(seq)
        seq.finish(SequenceStatus.FINISHED_STOPPED)
        self.kv.free(seq)
        assert seq.block_table == [], "who has ended holds nothing"


def hit(bench: Bench, tokens: list[int], salt: str | None = None) -> int:
    """How many tokens of a new request are found; it comes and goes."""
    seq = sequence(tokens, salt=salt)
    bench.kv.get_computed_blocks(seq)
    found = seq.num_computed_tokens
    bench.kv.free(seq)
    return found


def test_a_worked_case(component: Any) -> None:
    """Blocks of 2. After 1 2 3 4 5 the blocks (1 2) and (3 4) are found, by whoever begins so and is longer."""
    bench = Bench(component)
    first = sequence([1, 2, 3, 4, 5])
    assert hit(bench, [1, 2, 3, 4, 5]) == 0, "nothing was computed yet"
    assert bench.admit(first)
    assert hit(bench, [1, 2, 3, 4, 9]) == 4, "two full blocks, held by the first request, are shared"
    bench.end(first)
    assert hit(bench, [1, 2, 3, 4, 9]) == 4, "they are found after the request has ended, too"
    assert hit(bench, [1, 2, 3, 4]) == 2, "one token is left to compute, so the last block does not count"
    assert hit(bench, [1, 2, 9, 4, 5]) == 2, "what differs in the second block shares the first"
    assert hit(bench, [9, 2, 3, 4, 5]) == 0, "a block is found behind the same beginning alone"


def test_an_answer_is_found_too(component: Any) -> None:
    bench = Bench(component)
    seq = sequence([1, 2, 3])
    bench.admit(seq)
    for token in (4, 5):
        seq.append_token(token)
        assert bench.kv.allocate_slots(seq, 1), "there is room"
        bench.compute(seq, 1)
    assert hit(bench, [1, 2, 3, 4, 7]) == 4, "the second turn of a chat begins with the first and its answer"


def test_tokens_in_flight_have_no_name(component: Any) -> None:
    """With async_scheduling a step computes a token that the host does not know yet: `num_computed_tokens` is ahead."""
    bench = Bench(component)
    seq = sequence([1, 2, 3])
    bench.admit(seq)
    assert bench.kv.allocate_slots(seq, 1), "there is room"
    seq.num_computed_tokens = 4  # its fourth token was drawn on the device
    bench.kv.cache_blocks(seq)
    assert hit(bench, [1, 2, 3, 0, 7]) == 2, "a block is published when all its tokens are known"
    seq.append_token(9)
    bench.kv.cache_blocks(seq)
    assert hit(bench, [1, 2, 3, 9, 7]) == 4, "and then it is"


def test_tenants_share_nothing(component: Any) -> None:
    bench = Bench(component)
    bench.admit(sequence([1, 2, 3], salt="a"))
    assert [hit(bench, [1, 2, 3], salt) for salt in ("a", "b", None)] == [2, 0, 0], "equal salts alone share"


def test_a_shared_block_is_not_written(component: Any) -> None:
    bench = Bench(component)
    assert bench.admit(sequence([1, 2, 3, 4, 5])) and bench.admit(sequence([1, 2, 3, 4, 6]))
    one, other = bench.running
    assert one.block_table[:2] == other.block_table[:2], "the full blocks are shared"
    assert one.block_table[2] != other.block_table[2], "what is not full belongs to one"
    bench.end(one)
    bench.check(other)


def test_twins(component: Any) -> None:
    """The same prompt twice in one step: both compute it, each in its own blocks, and the cache keeps one of them."""
    bench = Bench(component, num_blocks=8)
    twins = [sequence([1, 2, 3, 4, 5]) for _ in range(2)]
    for seq in twins:
        bench.kv.get_computed_blocks(seq)
        assert bench.kv.allocate_slots(seq, 5), "there is room"
        seq.start()
        bench.running.append(seq)
    for seq in twins:
        bench.compute(seq, 5)
    for seq in twins:
        bench.end(seq)
    assert bench.kv.num_free == 8, "all blocks are free"
    assert hit(bench, [1, 2, 3, 4, 6]) == 4, "one of the two is found"
    assert bench.admit(sequence([7] * 16)), "and none was lost: 8 blocks hold 16 tokens"


def test_settled_blocks_are_found_in_the_same_step(component: Any) -> None:
    """Two requests of one system prompt arrive together: the second begins with the first's blocks."""
    kv = component(12, 2)
    scheduler = Scheduler(kv, 4, 100, chunk, preempt)
    seqs = [sequence([1, 2, 3, 4, 5]), sequence([1, 2, 3, 4, 6])]
    for seq in seqs:
        scheduler.add(seq)
    output = scheduler.schedule()
    assert [scheduled.num_new_tokens for scheduled in output.scheduled_seqs] == [5, 1], (
        "what `cache_scheduled_blocks` was told of can be found"
    )


def test_room_is_made(component: Any) -> None:
    """Cached blocks that nobody holds are free: they go when room is needed, and what is held stays."""
    bench = Bench(component, num_blocks=4)
    held = sequence([1, 2, 3])
    bench.admit(held)
    for token in range(10, 40):
        seq = sequence([token, token, token])
        assert bench.admit(seq), "two blocks are free, whatever they hold"
        bench.end(seq)
    assert hit(bench, [1, 2, 3]) == 2, "what somebody holds is not given up"
    assert bench.kv.stats.evictions > 0, "what was given up is counted in stats.evictions"


def test_an_evicted_block_is_not_found(component: Any) -> None:
    bench = Bench(component, num_blocks=3)
    first = sequence([1, 2, 3, 4, 5])
    bench.admit(first)
    bench.end(first)
    second = sequence([7, 7, 8, 8, 9])
    assert bench.admit(second), "all three blocks are free"
    bench.end(second)
    assert hit(bench, [1, 2, 3, 4, 5]) == 0, "its blocks hold something else now"
    assert hit(bench, [7, 7, 8, 8, 1]) == 4, "which is found"


def test_a_beginning_outlives_its_end(component: Any) -> None:
    """A block behind one that is gone can never be found: ends are given up before beginnings."""
    bench = Bench(component, num_blocks=4)
    seq = sequence([1, 2, 3, 4, 5, 6, 7])
    bench.admit(seq)
    bench.end(seq)
    assert bench.admit(sequence([9, 9, 9])), "two blocks go"
    assert hit(bench, [1, 2, 3, 4, 5, 6, 7]) >= 2, "the beginning of the prompt was given up before its end"


def test_reset(component: Any) -> None:
    bench = Bench(component)
    gone, held = sequence([1, 2, 3]), sequence([4, 5, 6, 7, 8])
    bench.admit(gone)
    bench.admit(held)
    bench.end(gone)
    bench.kv.reset()
    assert [hit(bench, [1, 2, 3]), hit(bench, [4, 5, 6])] == [0, 0], "after a reset nothing is found"
    assert bench.kv.stats.requests == 0, "the statistics begin anew"
    held.append_token(9)
    assert bench.kv.allocate_slots(held, 1), "there is room"
    bench.compute(held, 1)
    bench.end(held)
    assert bench.kv.num_free == 12, "who held blocks kept them, and gives them back"


def test_statistics(component: Any) -> None:
    """Counted when a request is admitted, not each time that it is looked at."""
    bench = Bench(component)
    bench.admit(sequence([1, 2, 3, 4, 5]))
    for _ in range(3):
        hit(bench, [1, 2, 3, 4, 6])
    second = sequence([1, 2, 3, 4, 6])
    bench.admit(second)
    stats = bench.kv.stats
    assert (stats.requests, stats.requests_hit) == (2, 1), "two were admitted, one of them found something"
    assert (stats.tokens, stats.tokens_hit) == (10, 4), "of 10 tokens 4 were found"
    assert second.num_cached_tokens == 4, "the answer says so: cached_prefix_of(seq).num_hit_tokens"


def test_a_prompt_that_is_scored_is_computed(component: Any) -> None:
    bench = Bench(component)
    bench.admit(sequence([1, 2, 3, 4, 5]))
    scored = sequence([1, 2, 3, 4, 5], prompt_logprobs=0)
    bench.kv.get_computed_blocks(scored)
    assert scored.num_computed_tokens == 0, "a cached token has K and V, and no score"


class Machine(RuleBasedStateMachine):
    """Sequences over three tokens, so that prefixes are shared all the time."""

    component: Any = None

    @initialize()
    def make(self) -> None:
        self.bench = Bench(type(self).component)
        self.waiting: list[Sequence] = []

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9), salt=st.sampled_from([None, "a"]))
    def arrive(self, tokens: list[int], salt: str | None) -> None:
        self.waiting.append(sequence(tokens, salt=salt))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.waiting))
        if self.bench.admit(seq, data.draw(st.integers(1, 9))):
            self.waiting.remove(seq)

    @precondition(lambda self: self.bench.running)
    @rule(data=st.data(), token=st.integers(0, 2))
    def advance(self, data: st.DataObject, token: int) -> None:
        seq = data.draw(st.sampled_from(self.bench.running))
        if seq.num_tokens == seq.num_computed_tokens:
            if seq.num_output_tokens == seq.max_tokens:
                return
            seq.append_token(token)
        count = data.draw(st.integers(1, seq.num_uncomputed_tokens))
        if self.bench.kv.allocate_slots(seq, count):
            self.bench.compute(seq, count)

    @precondition(lambda self: self.bench.running)
    @rule(data=st.data(), preempted=st.booleans())
    def give_up(self, data: st.DataObject, preempted: bool) -> None:
        seq = data.draw(st.sampled_from(self.bench.running))
        if preempted:
            self.bench.running.remove(seq)
            self.bench.kv.free(seq)
            seq.requeue()
            self.waiting.append(seq)
        else:
            self.bench.end(seq)

    @rule()
    def reset(self) -> None:
        self.bench.kv.reset()

    @invariant()
    def blocks_add_up(self) -> None:
        if not hasattr(self, "bench"):
            return
        held = {block for seq in self.bench.running for block in seq.block_table}
        assert self.bench.kv.num_free <= self.bench.kv.num_blocks - len(held), "a held block is not free"
        if not self.bench.running:
            assert self.bench.kv.num_free == self.bench.kv.num_blocks, "all is free when nobody runs"


def test_any_order_of_events(component: Any) -> None:
    machine = type("OwnMachine", (Machine,), {"component": component})
    machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
    machine.TestCase("runTest").runTest()


def test_in_the_engine(component: Any) -> None:
    """With few blocks, and prompts that share their beginnings."""
    assert_same_tokens("prefix_cache", 20, milestone="m5", block_size=4, num_kv_blocks=32, max_num_seqs=3)


def test_it_answers_as_a_cache_of_the_engine(component: Any) -> None:
    """The latest milestone, whose tokens arrive a step late: the same tokens as with the engine's own cache."""
    config: dict[str, Any] = {"milestone": "m6", "block_size": 4, "num_kv_blocks": 40}
    try:
        expected = texts(20, **config)
    except NotImplementedError as error:
        pytest.skip(f"it runs M6, which builds on M5: {error} is not written here yet")
    assert texts(20, **config, builders="prefix_cache") == expected, "tokens in flight are known to nobody"
