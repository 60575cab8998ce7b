"""Exercise m2.5: the new tokens of all sequences, end to end."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from folovllm.cache.slot_manager import SlotManager
from folovllm.step.draw import DrawSpec
from folovllm.step.schedule import Share
from folovllm.worker.input_batch import InputBatch, RaggedArrays
from tests.sequences import CountingCache, make_seq
from tests.tiny import worked_case

BATCH = InputBatch(SlotManager.slots, 100, torch.device("cpu"))


def item(num_prompt_tokens: int, start: int, count: int, slot: int) -> Share:
    """Tokens `start` to `start + count` of a sequence in row `slot` whose tokens are 10, 11, ..."""
    tokens, draws = make_seq(num_prompt_tokens).token_ids[start : start + count], start + count == num_prompt_tokens
    return Share(slot, slot, start, count, tokens, (slot,), 0, int(draws), DrawSpec())


def flatten(shares: list[Share], batch: InputBatch = BATCH) -> RaggedArrays:
    batch.note_blocks(shares)
    return batch.flatten(shares)


def lists(arrays: RaggedArrays) -> dict[str, list[int]]:
    return {name: getattr(arrays, name).tolist() for name in arrays.__slots__}


class TestFlatten:
    def test_a_worked_case(self) -> None:
        """Tokens are 10, 11, ...; slots are 100 tokens long. One decodes its sixth token, a prompt has three."""
        got = lists(flatten([item(6, 5, 1, slot=2), item(3, 0, 3, slot=0)]))
        expected = {
            "input_ids": [15, 10, 11, 12],
            "positions": [5, 0, 1, 2],
            "slot_mapping": [205, 0, 1, 2],
            "query_start_loc": [0, 1, 4],
            "logits_indices": [0, 3],
        }
        worked_case(
            "m2.5", got, expected, "token 5 of the sequence in slot 2, then tokens 0, 1, 2 of the one in slot 0"
        )

    def test_one_prompt(self) -> None:
        assert lists(flatten([item(3, 0, 3, slot=2)])) == {
            "input_ids": [10, 11, 12],
            "positions": [0, 1, 2],
            "slot_mapping": [200, 201, 202],
            "query_start_loc": [0, 3],
            "logits_indices": [2],
        }

    def test_decodes_and_a_prompt(self) -> None:
        assert lists(flatten([item(8, 7, 1, slot=3), item(5, 4, 1, slot=0), item(4, 0, 4, slot=1)])) == {
            "input_ids": [17, 14, 10, 11, 12, 13],
            "positions": [7, 4, 0, 1, 2, 3],
            "slot_mapping": [307, 4, 100, 101, 102, 103],
            "query_start_loc": [0, 1, 2, 6],
            "logits_indices": [0, 1, 5],
        }

    def test_a_piece_from_the_middle(self) -> None:
        arrays = flatten([item(9, 2, 3, slot=0)])
        assert arrays.input_ids.tolist() == [12, 13, 14] and arrays.positions.tolist() == [2, 3, 4]

    def test_the_cache_says_where(self) -> None:
        """The slots are the manager's business: another one lays them out otherwise."""
        batch = InputBatch(CountingCache.slots, 100, torch.device("cpu"))
        assert flatten([item(3, 1, 2, slot=4)], batch).slot_mapping.tolist() == [4001, 4002]

    def test_indices_are_64_bit(self) -> None:
        """As an index torch takes int64; and a slot times the context may pass 2**31."""
        arrays = flatten([item(3, 0, 3, slot=0), item(2, 0, 2, slot=1)])
        names = ("input_ids", "positions", "slot_mapping", "logits_indices")
        assert {name: str(getattr(arrays, name).dtype) for name in names} == dict.fromkeys(names, "int64")

    @given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=8))
    def test_every_piece_is_found_again(self, pieces: list[tuple[int, int]]) -> None:
        items = [item(start + count, start, count, slot) for slot, (start, count) in enumerate(pieces)]
        arrays = flatten(items)
        bounds = arrays.query_start_loc.tolist()
        assert bounds[0] == 0 and bounds[-1] == len(arrays.input_ids) == sum(count for _, count in pieces)
        assert len(arrays.positions) == len(arrays.slot_mapping) == bounds[-1]
        for i, (start, count) in enumerate(pieces):
            own = slice(bounds[i], bounds[i + 1])
            assert arrays.positions[own].tolist() == list(range(start, start + count))
            assert arrays.input_ids[own].tolist() == [10 + p for p in range(start, start + count)]
            assert arrays.slot_mapping[own].tolist() == [100 * i + p for p in range(start, start + count)]
            assert arrays.logits_indices[i] == bounds[i + 1] - 1


def test_a_batch_on_the_device() -> None:
    batch = BATCH.build([item(8, 7, 1, slot=3), item(5, 4, 1, slot=0), item(4, 0, 4, slot=1)])
    assert batch.seq_lens.tolist() == batch.seq_lens_host == [8, 5, 4]
    assert batch.query_lens_host == [1, 1, 4] and batch.block_tables.tolist() == [[3], [0], [1]]
    assert (batch.num_seqs, batch.num_decodes, batch.max_query_len, batch.max_seq_len) == (3, 2, 4, 8)
    assert batch.query_start_loc.dtype == batch.seq_lens.dtype == batch.block_tables.dtype == torch.int32


@pytest.mark.parametrize(("items", "decodes"), [([(5, 4, 1)], 1), ([(5, 0, 5)], 0)])
def test_how_many_decode(items: list[tuple[int, int, int]], decodes: int) -> None:
    assert BATCH.build([item(*piece, slot=0) for piece in items]).num_decodes == decodes
