"""Storing K/V: every token in its slot, nothing anywhere else."""

import pytest
import torch

from folovllm.kernels.store import store_kvcache
from tests.m4.cases import DEVICE
from tests.tiny import worked_case


def cache(num_blocks, block_size, heads, dim, dtype=torch.float32):
    """[2, N, B, Hkv, D] over physical [2, N, Hkv, B, D], filled with 7."""
    physical = torch.full((2, num_blocks, heads, block_size, dim), 7.0, dtype=dtype, device=DEVICE)
    return physical.permute(0, 1, 3, 2, 4)


def stored(key, value, kv_cache, slots):
    """What the cache must hold afterwards, by a Python loop."""
    expected, block_size = kv_cache.clone(), kv_cache.shape[2]
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0, slot // block_size, slot % block_size] = key[token]
            expected[1, slot // block_size, slot % block_size] = value[token]
    return expected


def test_a_worked_case():
    """Tokens 1, 2, 3 with two heads of one number, 10 * token + head; two blocks of two places, full of 7."""
    keys = torch.tensor([[10.0, 11.0, 0.0], [20.0, 21.0, 0.0], [30.0, 31.0, 0.0]], device=DEVICE)
    values = torch.zeros(5, 2, device=DEVICE)
    values[:3] = -keys[:, :2]
    kv_cache = cache(2, 2, heads=2, dim=1)
    slots = torch.tensor([2, -1, 1], device=DEVICE)
    store_kvcache(keys[:, :2, None], values[:3, :, None], kv_cache, slots)
    keys, values = kv_cache.flatten(3).flatten(1, 2)
    expected = [[7.0, 7.0], [30.0, 31.0], [10.0, 11.0], [7.0, 7.0]]
    minus = [[7.0, 7.0], [-30.0, -31.0], [-10.0, -11.0], [7.0, 7.0]]
    says = "token 1 goes to slot 2, token 2 nowhere (-1), token 3 to slot 1, with both heads; a row for each slot"
    worked_case("m4.2", {"keys": keys, "values": values}, {"keys": expected, "values": minus}, says)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("block_size", "heads", "dim"), [(16, 2, 16), (5, 3, 8), (1, 1, 32)])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_each_token_goes_to_its_slot(block_size, heads, dim, dtype, slot_dtype):
    """Slots in no order, block and head counts that are no powers of two, both index types; -1 is skipped."""
    kv_cache = cache(6, block_size, heads, dim, dtype)
    slots = (torch.randperm(6 * block_size - 1)[:5] + 1).tolist()
    slots[:2] = [0, -1]
    key, value = (torch.randn(len(slots), heads, dim, dtype=dtype, device=DEVICE) for _ in "kv")
    expected = stored(key, value, kv_cache, slots)
    store_kvcache(key, value, kv_cache, torch.tensor(slots, dtype=slot_dtype, device=DEVICE))
    assert torch.equal(kv_cache, expected), f"heads at slots {slots}, but for -1, and nothing else in the cache changes"


def test_padding_does_not_write_the_last_slot():
    """As a Python index, -1 would be the cache's last slot."""
    kv_cache = cache(2, 4, 2, 16)
    key = value = torch.zeros(3, 2, 16, device=DEVICE)
    store_kvcache(key, value, kv_cache, torch.full((3,), -1, device=DEVICE))
    assert (kv_cache == 7).all(), "slot -1 writes nothing"


@pytest.mark.parametrize("of_one", [True, False])
def test_rows_that_are_not_contiguous(of_one):
    """Two slices of the QKV projection; and a slice beside a tensor of its own, with another stride."""
    qkv, own = torch.randn(4, 6, 16, device=DEVICE), torch.randn(4, 2, 16, device=DEVICE)
    key, value = qkv[:, 2:4], qkv[:, 4:] if of_one else own
    kv_cache, slots = cache(2, 8, 2, 16), [9, 0, 15, 3]
    expected = stored(key, value, kv_cache, slots)
    store_kvcache(key, value, kv_cache, torch.tensor(slots, device=DEVICE))
    assert torch.equal(kv_cache, expected), "the rows of a slice are stride_key and stride_value apart"


def test_nothing_to_store():
    """An empty batch launches nothing."""
    kv_cache = cache(1, 4, 1, 16)
    store_kvcache(*torch.empty(2, 0, 1, 16, device=DEVICE), kv_cache, torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert (kv_cache == 7).all(), "no tokens, no writes"


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_a_place_beyond_int32(slot_dtype, like_a_gpu):
    """Blocks of 2 ** 30 numbers, of which nearly none is touched: block 2 begins where int32 ends."""
    memory = torch.empty(2**31 + 128, dtype=torch.int8, device=DEVICE)
    kv_cache = memory.as_strided((2, 3, 2, 1, 16), (64, 2**30, 16, 16, 1))
    key, value = torch.arange(64, dtype=torch.int8, device=DEVICE).view(2, 2, 1, 16)
    store_kvcache(key, value, kv_cache, torch.tensor([5, 0], dtype=slot_dtype, device=DEVICE))
    for token, (block, within) in enumerate([(2, 1), (0, 0)]):
        assert torch.equal(kv_cache[0, block, within], key[token]), "the key's place overflowed an int32"
        assert torch.equal(kv_cache[1, block, within], value[token]), "the value's place overflowed an int32"


@pytest.mark.parametrize("far", ["key", "value"])
def test_rows_beyond_int32(far, like_a_gpu):
    """Rows of keys, or of values, are 2 ** 30 numbers apart: the third one begins where int32 ends."""
    rows = torch.empty(2**31 + 128, dtype=torch.int8, device=DEVICE).as_strided((3, 1, 16), (2**30, 16, 1))
    near = torch.arange(48, dtype=torch.int8, device=DEVICE).view(3, 1, 16)
    rows.copy_(near + 50)
    key, value = (rows, near) if far == "key" else (near, rows)
    kv_cache = cache(2, 2, 1, 16, torch.int8)
    store_kvcache(key, value, kv_cache, torch.tensor([3, -1, 0], device=DEVICE))
    expected = stored(key, value, cache(2, 2, 1, 16, torch.int8), [3, -1, 0])
    assert torch.equal(kv_cache, expected), f"token 2's {far} was read elsewhere: its number times stride is 2 ** 31"
