"""m3.5: blocks back into token order, and the backend that does so."""

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from folovllm.attention.backends.torch_naive import reshape_and_cache_kv
from folovllm.attention.backends.torch_paged import gather_blocks
from tests.tiny import worked_case


def cache_of(blocks: int, block_size: int, kv_heads: int = 2, head_dim: int = 4) -> torch.Tensor:
    """[2, N, B, Hkv, D] of NaN, a view as the engine makes it."""
    return torch.full((2, blocks, kv_heads, block_size, head_dim), torch.nan).transpose(2, 3)


def stored(table: list[int], block_size: int, seq_len: int, blocks: int) -> tuple[torch.Tensor, ...]:
    """A cache that holds `seq_len` tokens in the blocks of `table` and NaN elsewhere; their K and V."""
    generator = torch.Generator().manual_seed(seq_len)
    key, value = torch.randn(2, seq_len, 2, 4, generator=generator)
    slots = [table[p // block_size] * block_size + p % block_size for p in range(seq_len)]
    kv_cache = cache_of(blocks, block_size)
    reshape_and_cache_kv(key, value, kv_cache, torch.tensor(slots))
    return kv_cache, key, value


class Written(TorchDispatchMode):
    """Counts the numbers that operations write to new memory."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = isinstance(result, torch.Tensor) and result.is_floating_point() and not func.is_view
        if made and not any(name in str(func) for name in ("empty", "_unsafe_view")):  # which write nothing
            self.count += result.numel()
        return result


class TestGatherBlocks:
    def test_a_worked_case(self) -> None:
        """Each number says where it is: 100 * block + 10 * place + head; values are negative."""
        kv_cache = cache_of(3, 2, kv_heads=2, head_dim=1)
        for block, place, head in ((b, p, h) for b in range(3) for p in range(2) for h in range(2)):
            number = 100 * block + 10 * place + head
            kv_cache[:, block, place, head, 0] = torch.tensor([number, -number])
        key, value = gather_blocks(kv_cache, torch.tensor([2, 0, 1], dtype=torch.int32), 3)
        got = {"keys, a token a row": key.flatten(1), "values": value.flatten(1)}
        expected = [[200.0, 201.0], [210.0, 211.0], [0.0, 1.0]]
        says = "three tokens in blocks of two: both places of block 2, then the first of block 0; all heads of each"
        worked_case("m3.5", got, dict(zip(got, [expected, [[-x for x in row] for row in expected]], strict=True)), says)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_the_dtype_is_the_caches(self, dtype: torch.dtype) -> None:
        kv_cache, key, value = stored([2, 1], 4, 6, 3)
        got = gather_blocks(kv_cache.to(dtype), torch.tensor([2, 1], dtype=torch.int32), 6)
        assert [x.dtype for x in got] == [dtype] * 2, "the dtype of the cache: wider ones take twice the memory"
        assert torch.equal(got[0], key.to(dtype)) and torch.equal(got[1], value.to(dtype)), "and with the same numbers"

    @pytest.mark.parametrize("seq_len", [6, 8])
    def test_the_rest_of_the_table_means_nothing(self, seq_len: int) -> None:
        """Two blocks of 4, the second full or not, and then numbers of blocks that do not exist."""
        kv_cache, key, _ = stored([2, 1], 4, seq_len, 3)
        table, got = torch.tensor([2, 1, 10**6, -7], dtype=torch.int32), None
        with contextlib.suppress(IndexError):
            got = gather_blocks(kv_cache, table, seq_len)[0]
        says = f"{seq_len} tokens in blocks of 4: the first two entries of the table count, and no other is read"
        assert got is not None and torch.equal(got, key), says

    def test_the_cache_stays_as_it_is(self) -> None:
        kv_cache, *_ = stored([0, 1], 4, 7, 2)
        before = kv_cache.clone()
        gather_blocks(kv_cache, torch.tensor([0, 1]), 7)
        says = "who gathers reads: the cache has been written to"
        torch.testing.assert_close(kv_cache, before, rtol=0, atol=0, equal_nan=True, msg=says)

    def test_blocks_are_copied_once(self) -> None:
        """K and V of three blocks of 4 tokens with 2 heads of 4 numbers, and not twice as many."""
        kv_cache, *_ = stored([5, 0, 3], 4, 11, 6)
        with Written() as written:
            gather_blocks(kv_cache, torch.tensor([5, 0, 3], dtype=torch.int32), 11)
        once = 2 * 3 * 4 * 2 * 4
        says = f"K and V of three blocks are {once} numbers; you write {written.count}: what you picked out is copied again"
        assert written.count <= once, f"{says} (indexing keeps the order of memory, `index_select` does not)"

    @given(st.integers(1, 6), st.integers(1, 30), st.data())
    def test_reads_back_what_was_stored(self, block_size: int, seq_len: int, data: st.DataObject) -> None:
        blocks = -(-seq_len // block_size)
        table = data.draw(st.permutations(range(blocks + 2)))[:blocks]
        kv_cache, key, value = stored(table, block_size, seq_len, blocks + 2)
        got_key, got_value = gather_blocks(kv_cache, torch.tensor(table), seq_len)
        assert torch.equal(got_key, key), "keys in the order of the tokens"
        assert torch.equal(got_value, value), "values in the order of the tokens"
