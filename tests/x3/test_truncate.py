"""x3.3: the table of a sequence is cut back to the blocks that hold a computed token."""

from hypothesis import given
from hypothesis import strategies as st

from folovllm.cache.block_manager import BlockManager
from folovllm.engine.event_stream import Events
from folovllm.engine.events import Event, Snapshot, TableCut
from folovllm.request import Sequence
from tests.sequences import free_ids, holding
from tests.tiny import worked_case


def after(computed: int, *block_ids: int) -> tuple[BlockManager, Sequence]:
    kv = BlockManager(6, 4)
    seq = holding(kv, *block_ids, computed=computed, tokens=computed + 1)
    kv.truncate(seq)
    return kv, seq


def test_a_worked_case() -> None:
    """Blocks of four tokens; 5, 1, 3 and 0 were reserved for nine tokens and drafts, or for eight."""
    got = {}
    for computed in (9, 8):
        kv, seq = after(computed, 5, 1, 3, 0)
        holders = [block.ref_count for block in kv.blocks]
        got[f"{computed} computed"] = {"table": seq.block_table, "holders": holders, "free": free_ids(kv)}
    expected = {
        "9 computed": {"table": [5, 1, 3], "holders": [0, 1, 0, 1, 0, 1], "free": [0, 2, 4]},
        "8 computed": {"table": [5, 1], "holders": [0, 1, 0, 0, 0, 1], "free": [3, 0, 2, 4]},
    }
    says = "nine tokens need three blocks, eight need two; of what is cut the first is the next block to be taken"
    worked_case("x3.3", got, expected, says)


def test_nothing_to_cut() -> None:
    kv, seq = after(5, 2, 4)
    assert seq.block_table == [2, 4], "both blocks hold computed tokens"
    assert kv.num_free == 4, "none came back"


def test_nothing_is_computed() -> None:
    kv, seq = after(0, 2, 4)
    assert seq.block_table == [], "no token is computed: no block is needed"
    assert kv.num_free == 6, "all blocks are free"


def test_the_list_of_blocks_stays_the_same_object() -> None:
    kv = BlockManager(6, 4)
    seq = holding(kv, 5, 1, computed=3, tokens=4)
    table = seq.block_table
    kv.truncate(seq)
    assert table is seq.block_table == [5], "others look at this list"


def test_who_listens_is_told_of_each_block() -> None:
    kv, heard = BlockManager(6, 4), list[Event]()
    seq = holding(kv, 5, 1, 3, 0, computed=8, tokens=9)
    kv.events.subscribe(heard.extend, Snapshot(6, 4, 1, 64, 0, tuple(kv.block_states()), ()))
    kv.truncate(seq)
    kv.events.drain()
    told = {(event.seq_id, event.block_id) for event in heard if isinstance(event, TableCut)}
    assert told == {(seq.seq_id, 3), (seq.seq_id, 0)}, "blocks 3 and 0 left the table: who watches hears of both"


class Unheard(Events):
    """A stream without a listener."""

    def emit(self, event: Event) -> None:
        raise AssertionError(f"nobody listens (`events.on`), so nobody takes {event} away: such events fill the memory")


def test_who_does_not_listen_is_told_nothing() -> None:
    kv = BlockManager(6, 4, Unheard())
    kv.truncate(holding(kv, 5, 1, computed=3, tokens=4))


@given(st.integers(1, 20), st.integers(0, 3))
def test_reserving_again_gives_the_same_blocks(computed: int, more: int) -> None:
    kv = BlockManager(12, 4)
    seq = holding(kv, *range(-(-computed // 4)), computed=computed, tokens=computed + 1)
    before = list(seq.block_table)
    assert kv.allocate_slots(seq, 1 + 4 * more), "there are blocks enough"
    reserved = list(seq.block_table)
    kv.truncate(seq)
    assert seq.block_table == before, "what was reserved for drafts is gone, and nothing else"
    assert kv.num_free == 12 - len(before), "each block is in a table or free"
    assert kv.allocate_slots(seq, 1 + 4 * more), "as many blocks are free as before"
    assert seq.block_table == reserved, "what was cut is taken again, in the same order"
