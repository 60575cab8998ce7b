"""A block manager: no block has two owners, none is lost, and who runs may have the last one."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from folovllm.request import Sequence
from tests.builders.engines import assert_same_tokens
from tests.sequences import make_seq


def admitted(kv: Any, num_tokens: int) -> Sequence | None:
    """A sequence whose prompt was admitted whole, or None."""
    seq = make_seq(num_tokens, 200)
    if not kv.allocate_slots(seq, num_tokens):
        return None
    seq.start()
    seq.num_computed_tokens = num_tokens
    return seq


def grown(kv: Any, seq: Sequence, num_tokens: int = 1) -> bool:
    """Whether a running sequence got room for its next tokens."""
    fits = bool(kv.allocate_slots(seq, num_tokens))
    seq.num_computed_tokens += num_tokens * fits
    return fits


def check(kv: Any, holders: list[Sequence]) -> None:
    """What must be true at any time."""
    blocks = [block for seq in holders for block in seq.block_table]
    assert len(set(blocks)) == len(blocks), "a block is in one table, once"
    assert all(0 <= block < kv.num_blocks for block in blocks), "blocks are numbered 0 to num_blocks - 1"
    assert kv.num_free == kv.num_blocks - len(blocks), "num_free counts the blocks that are in no table"
    for seq in holders:
        needed = -(-seq.num_computed_tokens // kv.block_size)
        assert len(seq.block_table) == needed, "a table has the blocks that its tokens need, and no more"


def test_a_worked_case(component: Any) -> None:
    """Eight blocks of 4: a prompt of 9 tokens takes 3; it grows at token 13; freed, all eight are there again."""
    kv = component(8, 4)
    exact = admitted(kv, 8)
    assert exact is not None and len(exact.block_table) == 2, "8 tokens fill 2 blocks of 4 exactly, and need no third"
    kv.free(exact)
    seq = admitted(kv, 9)
    assert seq is not None and len(seq.block_table) == 3 and kv.num_free == 5, "9 tokens lie in 3 blocks of 4"
    steps = [len(seq.block_table) for _ in range(4) if grown(kv, seq)]
    assert steps == [3, 3, 3, 4], "tokens 10 to 12 fit into the third block, token 13 needs a fourth"
    kv.free(seq)
    assert kv.num_free == 8 and seq.block_table == [], "all blocks are back, and the table is empty"
    kv.free(seq)
    assert kv.num_free == 8, "to free what holds nothing changes nothing"


def test_the_table_that_is_there_is_extended(component: Any) -> None:
    """The scheduler reads the same list, and remembers how many of its entries the device knows."""
    kv = component(8, 4)
    seq = admitted(kv, 5)
    assert seq is not None
    table, before = seq.block_table, list(seq.block_table)
    grown(kv, seq, 8)
    assert seq.block_table is table, (
        "the list that is there is extended: a new list is one that the scheduler does not see"
    )
    assert table[:2] == before, "new blocks go behind those that are there"


def test_slots(component: Any) -> None:
    """Token p lies in block p // B of the table, at offset p % B."""
    assert component.slots([5, 1], 4, 2, 6).tolist() == [22, 23, 4, 5], "5 * 4 + 2, 5 * 4 + 3, 1 * 4 + 0, 1 * 4 + 1"
    assert component.slots([3], 4, 0, 0).tolist() == [], "no tokens, no slots"
    assert component.slots([2], 1, 0, 1).dtype.kind == "i", "slots are whole numbers"


def test_a_refusal_changes_nothing(component: Any) -> None:
    kv = component(4, 4)
    seq = admitted(kv, 8)
    assert seq is not None
    table = list(seq.block_table)
    assert admitted(kv, 100) is None, "100 tokens do not fit into two blocks of 4"
    assert kv.num_free == 2, "an admission that does not fit takes nothing"
    assert not grown(kv, seq, 100), "a running sequence cannot grow by 100 tokens either"
    assert seq.block_table == table and kv.num_free == 2, "a growth that does not fit takes nothing"


def test_who_runs_may_have_the_last_block(component: Any) -> None:
    """The watermark is for admissions: it is there so that running sequences can grow."""
    kv = component(8, 4)
    seqs = [seq for seq in (admitted(kv, 4) for _ in range(8)) if seq]
    assert seqs, "an empty pool admits somebody"
    free = kv.num_free
    for _ in range(4 * free):
        assert grown(kv, seqs[0]), "a running sequence grows down to the last free block"
    assert kv.num_free == 0, "a running sequence has taken the last free block"
    assert not grown(kv, seqs[0], 4), "no block is left, so it cannot grow any further"


@pytest.mark.parametrize("num_blocks", [1, 2, 8, 100, 1000])
def test_one_alone_may_have_everything(component: Any, num_blocks: int) -> None:
    """Else a request that fits into the cache would wait for ever."""
    kv = component(num_blocks, 4)
    assert admitted(kv, 4 * num_blocks) is not None, "no watermark where nobody else holds blocks"


def test_a_preempted_sequence_comes_back(component: Any) -> None:
    kv = component(4, 4)
    seq, other = admitted(kv, 7), admitted(kv, 4)
    assert seq is not None
    kv.free(seq)
    seq.requeue()
    if other:
        kv.free(other)
    assert kv.allocate_slots(seq, seq.num_tokens), "it is admitted again, with all its tokens"
    seq.start()
    seq.num_computed_tokens = seq.num_tokens
    check(kv, [seq])


def test_a_crowd_is_admitted(component: Any) -> None:
    """A watermark is not to leave most of the cache unused."""
    kv = component(256, 16)
    for _ in range(100):
        admitted(kv, 40)
    used = kv.num_blocks - kv.num_free
    assert used >= 128, (
        f"prompts of 3 blocks wait with {used} of 256 blocks in use; half should be: the watermark is too high"
    )


class Machine(RuleBasedStateMachine):
    """Any order of events."""

    component: Any = None

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def make(self, num_blocks: int, block_size: int) -> None:
        self.kv = type(self).component(num_blocks, block_size)
        self.seqs: list[Sequence] = []

    @rule(num_tokens=st.integers(1, 30))
    def admit(self, num_tokens: int) -> None:
        free = self.kv.num_free
        if (seq := admitted(self.kv, num_tokens)) is not None:
            self.seqs.append(seq)
        elif not self.seqs:
            assert -(-num_tokens // self.kv.block_size) > free, "it would have fitted, and nobody else is there"

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), num_tokens=st.sampled_from((1, 1, 1, 2, 7)))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        seq = data.draw(st.sampled_from(self.seqs))
        missing = -(-(seq.num_computed_tokens + num_tokens) // self.kv.block_size) - len(seq.block_table)
        fits = missing <= self.kv.num_free
        assert grown(self.kv, seq, num_tokens) is fits, "a running sequence grows exactly if there are blocks"

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.seqs))
        self.seqs.remove(seq)
        self.kv.free(seq)
        assert seq.block_table == [], "a freed sequence has an empty table"

    @invariant()
    def blocks_add_up(self) -> None:
        if hasattr(self, "kv"):
            check(self.kv, self.seqs)


def test_any_order_of_events(component: Any) -> None:
    machine = type("OwnMachine", (Machine,), {"component": component})
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
    machine.TestCase("runTest").runTest()


def test_in_the_engine(component: Any) -> None:
    """So few blocks that somebody is preempted."""
    assert_same_tokens("block_manager", 40, milestone="m3", block_size=4, num_kv_blocks=32, max_num_seqs=4)
