"""A prefill kernel against float64. All that it must not read is NaN, and block tables point nowhere beyond their blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")
from tests.builders.engines import assert_same_tokens
from tests.m4.cases import DEVICE, TOLERANCE, Paged, starts


def check(
    prefill: Any, lens: list[int], new: list[int], block_size: int = 16, heads: tuple[int, int] = (2, 1), dim: int = 16,
    dtype: torch.dtype = torch.float32, bound: int = 0, says: str = "the result is not float64's, up to rounding",
) -> None:  # fmt: skip
    torch.manual_seed(0)
    paged = Paged.make(lens, block_size, heads[1], dim, dtype)
    query = torch.randn(sum(new), heads[0], dim, device=DEVICE, dtype=dtype)
    out = torch.full_like(query, float("nan"))
    got = prefill(
        query, paged.kv_cache, starts(new), paged.seq_lens, paged.block_tables, bound or max(new), dim**-0.5, out
    )
    assert got.data_ptr() == out.data_ptr(), "the result is written to `out`, which is returned"
    assert not out.isnan().any(), "NaN: a row was not written, or a place was read that holds no token of the sequence"
    assert is_close(out, paged.attention(query, new)), says


def is_close(out: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((out.double() - expected).norm() <= TOLERANCE[out.dtype] * expected.norm())


def test_a_worked_case(component: Any) -> None:
    """All scores are 0, the value of token i is i: each token sees those before it and itself, so it gets i / 2."""
    paged = Paged.make([18], 16, 1, 16)
    position = torch.arange(18, device=DEVICE)
    paged.kv_cache[1, paged.block_tables[0, position // 16], position % 16, 0] = position[:, None].float()
    query = torch.zeros(18, 1, 16, device=DEVICE)
    out = component(query, paged.kv_cache, starts([18]), paged.seq_lens, paged.block_tables, 18, 0.25, query.clone())
    got = [round(out[i, 0, 0].item(), 3) for i in (0, 1, 15, 16, 17)]
    assert got == [0.0, 0.5, 7.5, 8.0, 8.5], "the mean of the values 0 to i is i / 2"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 65])
def test_whole_prompts(component: Any, length: int) -> None:
    check(component, [length], [length], says="a whole prompt: token i sees tokens 0 to i, at any length")


@pytest.mark.parametrize(("length", "new"), [(17, 1), (32, 16), (40, 7), (70, 31), (50, 49)])
def test_the_rest_after_cached_tokens(component: Any, length: int, new: int) -> None:
    """A chunk, or what comes behind a cached prefix: the queries stand at the end of the sequence."""
    says = "new token i stands at seq_lens - query_len + i, behind the cached ones, and sees all before it"
    check(component, [length], [new], says=says)


@pytest.mark.parametrize("block_size", [4, 16, 24, 64])
def test_a_ragged_batch_in_blocks_of_any_size(component: Any, block_size: int) -> None:
    says = "token p of a sequence lies in block table[p // B], at offset p % B; each sequence has a table and lengths of its own"
    check(component, [5, 20, 1, 37], [5, 3, 1, 20], block_size, says=says)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 2), (3, 1)])
def test_grouped_heads(component: Any, heads: tuple[int, int]) -> None:
    check(component, [19], [9], heads=heads, says="query head h reads KV head h // (Hq / Hkv)")


def test_half_precision_and_wider_heads(component: Any) -> None:
    check(component, [20, 33], [20, 10], dim=32, dtype=torch.float16)


def test_a_loose_bound_and_an_empty_row(component: Any) -> None:
    """max_query_len may be larger than any, and a sequence may have nothing new."""
    check(component, [21, 8], [6, 0], bound=50)


def test_large_scores(component: Any) -> None:
    """exp(800) is infinite: the largest score is taken off first."""
    torch.manual_seed(0)
    paged = Paged.make([20], 16, 1, 16)
    query = 60 * torch.randn(20, 1, 16, device=DEVICE)
    out = torch.full_like(query, float("nan"))
    component(query, paged.kv_cache, starts([20]), paged.seq_lens, paged.block_tables, 20, 0.25, out)
    assert is_close(out, paged.attention(query, [20])), "the largest score is subtracted before exp"


def test_decodes_before_are_left_alone(component: Any) -> None:
    torch.manual_seed(0)
    paged = Paged.make([9, 20], 16, 1, 16)
    query = torch.randn(6, 2, 16, device=DEVICE)
    out = torch.full_like(query, -5.0)
    component(query, paged.kv_cache, starts([1, 5]), paged.seq_lens, paged.block_tables, 5, 0.25, out, 1)
    assert (out[0] == -5).all(), "rows of sequences before first_seq belong to the decode kernel"
    assert is_close(out[1:], paged.attention(query, [1, 5])[1:]), "from first_seq on, all is computed"


def test_in_the_engine(component: Any) -> None:
    assert_same_tokens("prefill", 1, 1, milestone="m4", attention_backend="triton", max_num_seqs=2)
