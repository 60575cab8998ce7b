"""Exercise m2.4: a block belongs to one sequence from its first reservation until it is freed."""

from hypothesis import given
from hypothesis import strategies as st

from folovllm.cache.slot_manager import SlotManager
from tests.sequences import make_seq
from tests.tiny import worked_case


class TestReserve:
    def test_a_worked_case(self) -> None:
        """Two blocks: a takes one and asks again, b takes the other, a asks once more, and c comes too late."""
        slots, (a, b, c) = SlotManager(2, 100), [make_seq() for _ in "abc"]
        table = a.block_table
        got = {
            "a, a, b, a, c": [slots.allocate_slots(seq, 1) for seq in (a, a, b, a, c)],
            "blocks of a, b, c": [seq.block_table for seq in (a, b, c)],
            "is a's table the list that it had?": a.block_table is table,
        }
        says = "the free blocks are [1, 0], taken from the end; the number is appended to the table that is there"
        answers = [[True, True, True, True, False], [[0], [1], []], True]
        worked_case("m2.4", got, dict(zip(got, answers, strict=True)), says)

    def test_a_freed_slot_goes_to_the_next(self) -> None:
        slots, first, second = SlotManager(1, 100), make_seq(), make_seq()
        slots.allocate_slots(first, 3)
        slots.free(first)
        assert first.block_table == [] and slots.num_free == 1, "the block came back"
        assert slots.allocate_slots(second, 3) and second.block_table == [0], "the next one gets the freed block"
        slots.free(first)  # holds nothing: nothing comes back
        assert slots.num_free == 0, "a sequence without a block has nothing to give back"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_no_slot_is_lost_or_owned_twice(steps: list[tuple[bool, int]]) -> None:
    slots, seqs = SlotManager(3, 10), [make_seq() for _ in range(6)]
    for takes, i in steps:
        had, free = list(seqs[i].block_table), slots.num_free
        if takes:
            assert slots.allocate_slots(seqs[i], 1) is bool(had or free), "True if it had a block or one was free"
        else:
            slots.free(seqs[i])
        owned = [slot for seq in seqs for slot in seq.block_table]
        assert len(owned) == len(set(owned)) == 3 - slots.num_free, "a block is free or has one owner"
        assert set(owned) <= {0, 1, 2} and all(len(seq.block_table) <= 1 for seq in seqs), "one of the blocks, or none"
