"""`naive_attention`, `create_causal_mask`, and the two ways to store K/V."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from folovllm.attention.backends.torch_cat import GrowingKVCache
from folovllm.attention.backends.torch_naive import gather_kv, reshape_and_cache_kv
from folovllm.attention.ops import create_causal_mask, naive_attention
from tests.tiny import worked_case


def random_qkv(tq: int, tk: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(tq * 1000 + tk)
    shapes = ((tq, heads, head_dim), (tk, kv_heads, head_dim), (tk, kv_heads, head_dim))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def torch_attention(query, key, value, scale, mask=None):
    """PyTorch's own, which wants the heads first."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


class TestCausalMask:
    def test_a_worked_case(self) -> None:
        expected = [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
        says = "three tokens are cached and two are new, at positions 3 and 4: who may look at whom (1: may)?"
        worked_case("m1.1 mask", create_causal_mask(2, 5).int(), expected, says)

    def test_is_made_on_the_device_that_was_asked_for(self) -> None:
        mask = create_causal_mask(2, 3, device="meta")  # a device without memory, which every machine has
        assert mask.device.type == "meta", "the mask is to be on the device that `device` names"

    @given(st.integers(1, 12), st.integers(0, 12))
    def test_who_sees_whom(self, new: int, cached: int) -> None:
        mask = create_causal_mask(new, cached + new)
        assert mask.shape == (new, cached + new), "a row for each new token, a column for each token there is"
        assert mask.dtype == torch.bool, "True and False, not numbers"
        seen = [cached + i + 1 for i in range(new)]
        assert mask.sum(-1).tolist() == seen, "each new token sees the cached ones, the new ones before it, and itself"
        assert all(mask[i, : cached + i + 1].all() for i in range(new)), "what is seen are the first tokens of the row"


class TestNaiveAttention:
    def test_a_worked_case(self) -> None:
        """D = 1. All scores are 0 and 0.5 * 2 ln 3 = ln 3: weights 1/4 and 3/4. The third token is hidden."""
        query = torch.ones(1, 4, 1)  # four heads, two a KV head
        key = torch.tensor([0.0, 2 * math.log(3), 9.0]).view(3, 1, 1).expand(3, 2, 1)
        value = torch.tensor([[0.0, 0.0], [4.0, 40.0], [999.0, 999.0]])[..., None]  # KV head 0 says 4, head 1 says 40
        out = naive_attention(query, key, value, 0.5, torch.tensor([[True, True, False]]))
        says = "of 0 and 4 (the first KV head) and of 0 and 40 (the second), three quarters of the larger, for two heads each"
        worked_case("m1.1 attention", out.flatten(), [3.0, 3.0, 30.0, 30.0], says)

    def test_a_row_in_which_nothing_is_allowed(self) -> None:
        query, key, value = torch.ones(1, 1, 1), torch.ones(2, 1, 1), torch.tensor([4.0, 8.0]).view(2, 1, 1)
        out = naive_attention(query, key, value, 1.0, torch.tensor([[False, False]]))
        says = "softmax of nothing but -inf is 0 / 0: NaN says that nothing was there, where a number would hide it"
        worked_case("m1.1 nothing", out.flatten(), [math.nan], says)

    def test_what_is_hidden_weighs_nothing_however_small_the_scores(self) -> None:
        query, key, value = (torch.tensor(x).view(-1, 1, 1) for x in ([100.0], [-1000.0, 0.0], [1.0, 2.0]))
        out = naive_attention(query, key, value, 1.0, torch.tensor([[True, False]]))
        assert out.item() == 1, "the one token that may be seen has a score of -100,000, and still all the weight"

    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 2), (7, 1), (9, 3)])
    @pytest.mark.parametrize(("tq", "tk"), [(5, 5), (1, 9), (3, 8)])
    def test_equals_pytorch(self, heads: int, kv_heads: int, tq: int, tk: int) -> None:
        query, key, value = random_qkv(tq, tk, heads, kv_heads, 16)
        mask = torch.ones(tq, tk).tril(tk - tq).bool()
        out = naive_attention(query, key, value, 0.25, mask)
        assert out.shape == query.shape, "a result for every head of every query"
        says = f"{tq} queries, {tk} keys, {heads} query heads, {kv_heads} KV heads: head i reads KV head i // {heads // kv_heads}"
        torch.testing.assert_close(out, torch_attention(query, key, value, 0.25, mask), rtol=1e-5, atol=1e-5, msg=says)

    def test_without_a_mask_everything_is_seen(self) -> None:
        query, key, value = random_qkv(2, 6, 4, 2, 8)
        expected = torch_attention(query, key, value, 0.3)
        torch.testing.assert_close(naive_attention(query, key, value, 0.3), expected, msg="without a mask all is seen")

    def test_the_result_has_the_dtype_of_the_values(self) -> None:
        query, key, value = random_qkv(2, 5, 4, 2, 8)
        out = naive_attention(query, key, value.bfloat16(), 0.3)
        assert out.dtype == torch.bfloat16, f"values are bfloat16, and so is the result, not {out.dtype}"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_many_small_weights(self, dtype: torch.dtype) -> None:
        """4,096 equal scores: a sum of so many ones in 16 bits ends at 256 or 2,048."""
        query, key, value = (torch.full((n, 1, 4), x, dtype=dtype) for n, x in ((1, 0.0), (4096, 1.0), (4096, 1.0)))
        found = naive_attention(query, key, value, 1.0)[0, 0, 0].item()
        assert abs(found - 1) < 0.02, f"the mean of 4,096 ones is 1, not {found}: softmax is in float32"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype: torch.dtype) -> None:
        query, key, value = random_qkv(4, 200, 4, 2, 32, dtype)
        out = naive_attention(query, key, value, 32**-0.5)
        assert out.dtype == dtype, "the result has the dtype of the values"
        exact = torch_attention(query.double(), key.double(), value.double(), 32**-0.5)
        says = f"200 keys in {dtype}: further off the exact attention than two roundings are"
        torch.testing.assert_close(out.double(), exact, rtol=0.02, atol=0.01, msg=says)


def empty_cache(blocks: int, block_size: int, kv_heads: int = 2, head_dim: int = 4) -> torch.Tensor:
    """As the engine allocates it: [2, N, B, Hkv, D], a view that cannot be flattened."""
    return torch.zeros(2, blocks, kv_heads, block_size, head_dim).transpose(2, 3)


class TestReshapeAndCacheKV:
    def test_each_token_lands_in_its_slot(self) -> None:
        _, key, value = random_qkv(1, 5, 2, 2, 4)
        kv_cache = empty_cache(blocks=3, block_size=4)
        slots = [11, 0, 5, -1, 3]
        reshape_and_cache_kv(key, value, kv_cache, torch.tensor(slots))
        for i, slot in enumerate(slots):
            if slot == -1:
                key[i] = value[i] = 0  # it is stored nowhere
                continue
            assert torch.equal(kv_cache[0, slot // 4, slot % 4], key[i])
            assert torch.equal(kv_cache[1, slot // 4, slot % 4], value[i])
        assert kv_cache.count_nonzero() == key.count_nonzero() + value.count_nonzero()  # nothing else was touched

    @given(st.data())
    def test_gather_reads_back_what_was_stored(self, data: st.DataObject) -> None:
        block_size, seq_len = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 30))
        blocks = -(-seq_len // block_size)
        table = torch.tensor(data.draw(st.permutations(range(blocks + 2)))[:blocks], dtype=torch.int32)
        position = torch.arange(seq_len)
        slots = table[position // block_size].long() * block_size + position % block_size
        _, key, value = random_qkv(1, seq_len, 2, 2, 4)
        kv_cache = empty_cache(blocks + 2, block_size)
        reshape_and_cache_kv(key, value, kv_cache, slots)
        got_key, got_value = gather_kv(kv_cache, table, seq_len)
        assert torch.equal(got_key, key)
        assert torch.equal(got_value, value)


class TestGrowingCache:
    def test_grows_and_forgets(self) -> None:
        _, key, value = random_qkv(1, 5, 2, 2, 4)
        cache = GrowingKVCache()
        assert len(cache) == 0
        for start, end in ((0, 3), (3, 4), (4, 5)):
            cache.append(key[start:end], value[start:end])
        assert len(cache) == 5
        assert torch.equal(cache.key, key)
        assert torch.equal(cache.value, value)
        cache.reset()
        assert len(cache) == 0
