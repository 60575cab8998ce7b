"""x6.3: attention whose sums are split at the same places, whatever else is there."""

from __future__ import annotations

from math import log

import pytest
import torch

from folovllm.attention.ops import create_causal_mask, naive_attention
from folovllm.rollouts.attention import CONTEXT, QUERIES, attend_in_tiles
from tests.tiny import worked_case


def heads(num_tokens: int, length: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Query [1, 1, num_tokens, 16], key and value [1, 1, length, 16]."""
    generator = torch.Generator().manual_seed(0)
    sizes = num_tokens, length, length
    return tuple(torch.randn(1, 1, size, 16, generator=generator).to(dtype) for size in sizes)


def test_a_worked_case() -> None:
    """Two positions are seen, of a context of two tiles."""
    key, value = torch.zeros(1, 1, 2 * CONTEXT, 2), torch.zeros(1, 1, 2 * CONTEXT, 2)
    key[0, 0, 0, 0], key[0, 0, 1, 0] = log(9.0), log(1.0)
    value[0, 0, 0, 0], value[0, 0, 1, 1] = 1.0, 1.0
    query = torch.tensor([[[[1.0, 0.0]]]])
    got = attend_in_tiles(query, key, value, torch.tensor([[1]]), scale=0.5)[0, 0, 0]
    says = "scores are log(9) / 2 and 0, so the weights are 3 and 1 of 4; all later positions are not seen"
    worked_case("x6.3", got, [0.75, 0.25], says)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_it_is_attention(length: int) -> None:
    query, key, value = heads(length, -(-length // CONTEXT) * CONTEXT)
    got = attend_in_tiles(query, key, value, torch.arange(length)[None], 0.25)[0, 0]
    rows = (x[0, 0, :length, None] for x in (query, key, value))
    expected = naive_attention(*rows, 0.25, create_causal_mask(length, length))[:, 0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [50, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_longer_batch_changes_no_bit(dtype: torch.dtype, length: int) -> None:
    """A short sequence beside one of 1,000 tokens gets the same bits as alone."""
    query, key, value = heads(16, 1024, dtype)
    positions, tiles = torch.arange(length - 16, length)[None], slice(-(-length // CONTEXT) * CONTEXT)
    alone = attend_in_tiles(query, key[:, :, tiles], value[:, :, tiles], positions, 0.25)
    beside = attend_in_tiles(query, key, value, positions, 0.25)
    assert torch.equal(alone, beside), "what a query does not see must add exactly nothing"


def test_neighbours_change_no_bit() -> None:
    """A decode's token stands alone in its tile of queries, a prompt's beside others."""
    query, key, value = heads(2 * QUERIES, 3 * CONTEXT)
    positions = torch.arange(140, 140 + 2 * QUERIES)[None]
    whole = attend_in_tiles(query, key, value, positions, 0.25)
    for i in range(2 * QUERIES):
        alone = torch.zeros_like(query)
        alone[:, :, 0] = query[:, :, i]
        at = torch.zeros_like(positions)
        at[:, 0] = positions[:, i]
        assert torch.equal(attend_in_tiles(alone, key, value, at, 0.25)[:, :, 0], whole[:, :, i]), f"token {i}"
