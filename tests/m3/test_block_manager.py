"""The block manager, a method at a time: tables, slots, growth, and blocks that come back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from folovllm.cache.block_manager import BlockManager
from folovllm.request import Sequence
from tests.sequences import free_ids, holding, make_seq
from tests.tiny import worked_case


class TestSlots:
    """m3.1"""

    def test_a_worked_case(self) -> None:
        says = "tokens 2 to 5 of the table [5, 1], four places a block: 5 * 4 + 2, 5 * 4 + 3, then 1 * 4 + 0, 1 * 4 + 1"
        slots = BlockManager.slots([5, 1], 4, 2, 6)
        worked_case("m3.1", slots, [22, 23, 4, 5], f"from 2 up to 6, which is not one of them: {says}")
        assert isinstance(slots, np.ndarray), f"the slots are right, but no numpy array: a {type(slots).__name__}"

    def test_integers_for_torch(self) -> None:
        slots = BlockManager.slots([1, 0], 4, 2, 7)
        assert isinstance(slots, np.ndarray) and slots.dtype == np.int64, "int64 in an array: torch takes it as index"

    def test_places_beyond_32_bits(self) -> None:
        slots = BlockManager.slots([2**28], 16, 3, 5)
        assert slots.tolist() == [2**32 + 3, 2**32 + 4], f"block 2^28 of 16 places begins at 2^32: not {slots.tolist()}"

    @given(st.permutations(range(9)), st.integers(1, 7), st.data())
    def test_every_token_has_a_place_of_its_own(self, table: list[int], block_size: int, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, 9 * block_size - 1))
        end = data.draw(st.integers(start + 1, 9 * block_size))
        slots = [divmod(s, block_size) for s in BlockManager.slots(table, block_size, start, end).tolist()]
        expected = [(table[p // block_size], p % block_size) for p in range(start, end)]
        assert slots == expected, "each token lies in its own block, at its own offset"


class TestAllocate:
    """m3.2"""

    def test_a_worked_case(self) -> None:
        """Six blocks of four tokens. One sequence has block 3, with four tokens in it, another has nothing."""
        kv, new = BlockManager(6, 4), make_seq(5)
        old = holding(kv, 3, computed=4)
        kv.allocate(old, 4)
        kv.allocate(new, 5)
        got = {
            "8 tokens, of which 4 lie in block 3": old.block_table,
            "5 tokens": new.block_table,
            "holders of each block": [block.ref_count for block in kv.blocks],
            "tokens computed so far": old.num_computed_tokens,
        }
        says = "8 tokens fill two blocks, 5 need two; the free ones are 0, 1, 2, 4, 5; nothing was computed by it"
        worked_case("m3.2", got, dict(zip(got, [[3, 0], [1, 2], [1, 1, 1, 1, 0, 0], 4], strict=True)), says)

    @pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
    def test_as_many_blocks_as_the_tokens_fill(self, tokens: int, blocks: int) -> None:
        kv, seq = BlockManager(8, 16), make_seq(tokens)
        kv.allocate(seq, tokens)
        assert len(seq.block_table) == blocks, "as many blocks as the tokens fill, rounded up"
        assert kv.num_free == 8 - blocks, "what the table has, the free list has not"

    def test_places_that_are_left_in_the_last_block_are_used(self) -> None:
        """Six tokens in two blocks of four: two places are left."""
        for new, table in ((2, [6, 2]), (3, [6, 2, 0])):
            kv = BlockManager(8, 4)
            seq = holding(kv, 6, 2, computed=6)
            kv.allocate(seq, new)
            assert seq.block_table == table, f"6 tokens and {new} more: the first two go to places left in block 2"

    def test_tokens_of_later_steps_take_no_block(self) -> None:
        """A prompt that is computed in chunks."""
        kv, seq = BlockManager(8, 4), make_seq(20)
        kv.allocate(seq, 6)
        assert seq.block_table == [0, 1], f"6 of 20 tokens come now: two blocks, not {seq.block_table}"


class TestMayAppend:
    """m3.3"""

    def test_a_worked_case(self) -> None:
        """Blocks of four tokens; blocks 2 and 3 are taken."""
        kv, got = BlockManager(6, 4), {}
        seq, other = holding(kv, 2, computed=3), holding(kv, 3, computed=1)
        kv.may_append(seq, 1)
        got["a fourth token"] = list(seq.block_table)
        seq.num_computed_tokens = 4
        kv.may_append(seq, 1)
        got["a fifth"] = list(seq.block_table)
        kv.may_append(seq, 1)
        got["the fifth again, because the step did not run"] = list(seq.block_table)
        kv.may_append(other, 9)
        got["nine after the first"] = list(other.block_table)
        answers = [[2], [2, 0], [2, 0], [3, 1, 4]]
        says = "as many blocks as the tokens need and no more: 4 tokens fill one, 5 need two, 10 need three"
        worked_case("m3.3", got, dict(zip(got, answers, strict=True)), says)

    def test_tokens_of_later_steps_take_no_block(self) -> None:
        """A prompt that is computed in chunks."""
        kv = BlockManager(8, 4)
        seq = holding(kv, 2, computed=2, tokens=20)
        kv.may_append(seq, 4)
        assert seq.block_table == [2, 0], f"2 tokens are computed and 4 more come: two blocks, not {seq.block_table}"

    def grow(self, kv: BlockManager, seq: Sequence, tokens: int = 1) -> None:
        kv.may_append(seq, tokens)
        seq.num_computed_tokens += tokens

    def test_a_full_block_is_followed_by_another(self) -> None:
        kv = BlockManager(4, 4)
        seq = holding(kv, 2, computed=4)
        self.grow(kv, seq)
        assert (seq.block_table, kv.num_free) == ([2, 0], 2), "the block is full: the fifth token needs another"
        assert kv.blocks[0].ref_count == 1, "the new block has one holder"

    @pytest.mark.parametrize("block_size", [1, 2, 3, 16])
    def test_one_block_every_block_size_steps(self, block_size: int) -> None:
        kv = BlockManager(40 // block_size + 2, block_size)
        seq = holding(kv, 0, computed=1)
        for tokens in range(2, 41):
            self.grow(kv, seq)
            assert len(seq.block_table) == -(-tokens // block_size), "as many blocks as the tokens fill, rounded up"


class TestDeallocate:
    """m3.4"""

    def test_a_worked_case(self) -> None:
        """Six blocks. One sequence holds 4, 1 and 5, and another holds 1 too."""
        kv = BlockManager(6, 4)
        seq = holding(kv, 4, 1, 5, computed=12)
        holding(kv, 1, computed=4)
        kv.deallocate(seq)
        got = {"its table": seq.block_table, "holders of each block": [block.ref_count for block in kv.blocks]}
        assert seq.num_computed_tokens == 12, "whose tokens are computed is not for the blocks to say"
        got |= {"free, next one first": free_ids(kv)}
        says = "the last block goes first, to the end of the free list (0, 2, 3); block 1 has another holder and stays"
        worked_case("m3.4", got, dict(zip(got, [[], [0, 1, 0, 0, 0, 0], [0, 2, 3, 5, 4]], strict=True)), says)

    def test_twice_is_once(self) -> None:
        kv = BlockManager(4, 4)
        seq = holding(kv, 2, 0, computed=8)
        kv.deallocate(seq)
        kv.deallocate(seq)
        assert kv.num_free == 4, "a table that is empty gives nothing back"

    def test_a_shared_block_goes_with_its_last_holder(self) -> None:
        kv = BlockManager(3, 4)
        first, second = holding(kv, 0, 1, computed=8), holding(kv, 0, 2, computed=8)
        kv.deallocate(first)
        kv.deallocate(second)
        assert free_ids(kv) == [1, 2, 0], "a shared block is free when its last holder leaves"


class TestAdmission:
    """`can_allocate` and `can_append`: what is asked before."""

    def test_the_watermark_is_kept_for_those_who_run(self) -> None:
        kv = BlockManager(300, 1)  # a watermark of 3 blocks
        assert kv.can_allocate(make_seq(300), 300)  # nobody runs: nothing is held back
        runner = holding(kv, 0, computed=1)
        assert kv.can_allocate(make_seq(296), 296)
        assert not kv.can_allocate(make_seq(297), 297)
        assert kv.can_append(runner, 299)
        assert not kv.can_append(runner, 300)

    def test_own_blocks_are_no_reason_to_hold_back(self) -> None:
        kv = BlockManager(300, 1)
        seq = holding(kv, *range(10), computed=10)
        assert kv.can_allocate(seq, 290)
