"""Exercise m2.5: the new tokens of all sequences, end to end."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from folovllm.cache.slot_manager import SlotManager
from folovllm.step.schedule import SamplingSpec, ScheduledSequence
from folovllm.worker.input_batch import InputBatch, RaggedArrays
from tests.sequences import CountingCache, make_seq
from tests.tiny import worked_case

BATCH = InputBatch(SlotManager.slots, 100, torch.device("cpu"))


def item(num_prompt_tokens: int, start: int, count: int, slot: int, row: int | None = None) -> ScheduledSequence:
    """Tokens `start` to `start + count` of a sequence whose tokens are 10, 11, ...: the first share of its row."""
    row = slot if row is None else row
    tokens, draws = make_seq(num_prompt_tokens).token_ids[start : start + count], start + count == num_prompt_tokens
    return ScheduledSequence(70 + row, row, start, start + count, tokens, (slot,), 0, int(draws), SamplingSpec())


def later(scheduled: ScheduledSequence) -> ScheduledSequence:
    """The same as a later share: the table is known already."""
    return scheduled._replace(new_blocks=(), first_new_block=1, sampling=None)


def flatten(scheduled_seqs: list[ScheduledSequence], batch: InputBatch = BATCH) -> RaggedArrays:
    batch.note_blocks(scheduled_seqs)
    return batch.flatten(scheduled_seqs)


def lists(arrays: RaggedArrays) -> dict[str, list[int]]:
    return {name: getattr(arrays, name).tolist() for name in arrays.__slots__}


def pairs(block_table: list[int], block_size: int, start: int, end: int) -> npt.NDArray[np.int64]:
    """Slots of a cache whose blocks have two tokens each."""
    return np.array([2 * block_table[p // 2] + p % 2 for p in range(start, end)])


class TestFlatten:
    def test_a_worked_case(self) -> None:
        """Tokens are 10, 11, ...; slots are 100 tokens long. Row 1 has slot 2 and decodes its sixth token, row 0 has slot 3 and a prompt of three."""
        batch = InputBatch(SlotManager.slots, 100, torch.device("cpu"))
        batch.block_tables = {0: [3], 1: [2]}
        got = lists(batch.flatten([later(item(6, 5, 1, slot=2, row=1)), item(3, 0, 3, slot=3, row=0)]))
        expected = {
            "input_ids": [15, 10, 11, 12],
            "positions": [5, 0, 1, 2],
            "slot_mapping": [205, 300, 301, 302],
            "query_start_loc": [0, 1, 4],
            "logits_indices": [0, 3],
        }
        says = "token 5 of the sequence in row 1, whose slot is 2, then tokens 0, 1, 2 of the one in row 0, whose slot is 3"
        worked_case("m2.5", got, expected, says)

    def test_a_table_that_is_known_already(self) -> None:
        """What the share brings is the end of the table; the rest came with the shares before it."""
        batch = InputBatch(pairs, 2, torch.device("cpu"))
        first = item(4, 0, 4, slot=5, row=1)._replace(new_blocks=(5, 3))
        assert flatten([first], batch).slot_mapping.tolist() == [10, 11, 6, 7], "two tokens a block: blocks 5 and 3"
        second = later(item(6, 4, 1, slot=0, row=1))._replace(new_blocks=(8,), first_new_block=2)
        assert flatten([second], batch).slot_mapping.tolist() == [16], "token 4 begins the third block of the table, 8"
        third = later(item(6, 5, 1, slot=0, row=1))
        assert flatten([third], batch).slot_mapping.tolist() == [17], "token 5 is in block 8 too: the share brings none"

    def test_the_cache_says_where(self) -> None:
        """The slots are the manager's business: another one lays them out otherwise."""
        batch = InputBatch(CountingCache.slots, 100, torch.device("cpu"))
        slots = flatten([item(3, 1, 2, slot=4)], batch).slot_mapping.tolist()
        assert slots == [4001, 4002], "what `self._slots` gives for the table, the block size, start and end"

    def test_indices_are_64_bit(self) -> None:
        """As an index torch takes int64; and a slot times the context may pass 2**31."""
        arrays = flatten([item(3, 0, 3, slot=0), item(2, 0, 2, slot=1)])
        names = ("input_ids", "positions", "slot_mapping", "query_start_loc", "logits_indices")
        types = {name: str(getattr(arrays, name).dtype) for name in names}
        assert types == dict.fromkeys(names, "int64"), "token ids are int32 in the share, and int64 here"

    @given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=8))
    def test_every_piece_is_found_again(self, pieces: list[tuple[int, int]]) -> None:
        items = [item(start + count, start, count, slot) for slot, (start, count) in enumerate(pieces)]
        arrays = flatten(items)
        bounds = arrays.query_start_loc.tolist()
        assert bounds[0] == 0, "the first share begins at 0"
        assert bounds[-1] == len(arrays.input_ids) == sum(count for _, count in pieces), "the last bound is T"
        assert len(arrays.positions) == len(arrays.slot_mapping) == bounds[-1], "one position and one slot a token"
        for i, (start, count) in enumerate(pieces):
            own, where = slice(bounds[i], bounds[i + 1]), f"share {i} of {pieces} (start, number of tokens): "
            tokens = range(start, start + count)
            assert arrays.positions[own].tolist() == list(tokens), f"{where}its positions"
            assert arrays.input_ids[own].tolist() == [10 + p for p in tokens], f"{where}its tokens"
            assert arrays.slot_mapping[own].tolist() == [100 * i + p for p in tokens], f"{where}its slots"
            assert arrays.logits_indices[i] == bounds[i + 1] - 1, f"{where}its last token"


def test_a_batch_on_the_device() -> None:
    batch = BATCH.build([item(8, 7, 1, slot=3), item(5, 4, 1, slot=0), item(4, 0, 4, slot=1)])
    assert batch.seq_lens.tolist() == batch.seq_lens_host == [8, 5, 4]
    assert batch.query_lens_host == [1, 1, 4] and batch.block_tables.tolist() == [[3], [0], [1]]
    assert (batch.num_seqs, batch.num_decodes, batch.max_query_len, batch.max_seq_len) == (3, 2, 4, 8)
    assert batch.query_start_loc.dtype == batch.seq_lens.dtype == batch.block_tables.dtype == torch.int32


def test_a_new_owner_of_a_row_begins_a_table_of_its_own() -> None:
    batch = InputBatch(SlotManager.slots, 100, torch.device("cpu"))
    for slot in (2, 5):
        assert batch.build([item(3, 0, 3, slot, row=0)]).block_tables.tolist() == [[slot]]


@pytest.mark.parametrize(("items", "decodes"), [
    ([(5, 4, 1)], 1), ([(5, 0, 5)], 0), ([(5, 0, 5), (5, 0, 1)], 0), ([(5, 4, 1), (5, 0, 5), (5, 0, 1)], 1),
])  # fmt: skip
def test_how_many_decode(items: list[tuple[int, int, int]], decodes: int) -> None:
    got = BATCH.build([item(*piece, slot=0) for piece in items]).num_decodes
    assert got == decodes, "only those in front: backends take the first `num_decodes` sequences for one token each"
