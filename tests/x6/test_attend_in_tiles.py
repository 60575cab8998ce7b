"""x6.3: attention whose sums are split at the same places, whatever else is there."""

from math import exp, log

import pytest
import torch

from folovllm.attention.ops import create_causal_mask, naive_attention
from folovllm.electives.rollouts.attention import CONTEXT, QUERIES, attend_in_tiles
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
    error = (got - expected).abs().amax(1)
    worst = int(error.nan_to_num(torch.inf).argmax())
    says = f"the query at position {worst} of {length} gets a result that is {error[worst]:.3g} off plain softmax attention"
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, msg=says)


def test_items_and_heads_are_independent() -> None:
    """Three items at other positions, two KV heads, several tiles: each is plain softmax attention over its own K and V."""
    generator = torch.Generator().manual_seed(0)
    length = 3 * CONTEXT
    query, key, value = (torch.randn(3, 2, size, 16, generator=generator) for size in (5, length, length))
    positions = torch.tensor([[0, 1, 2, 3, 4], [60, 61, 64, 65, 130], [191, 7, 100, 63, 128]])
    given, copies = (query, key, value, positions), (query.clone(), key.clone(), value.clone(), positions.clone())
    got = attend_in_tiles(*given, 0.25)
    assert all(map(torch.equal, given, copies)), "an argument was written over"
    seen = torch.arange(length) <= positions[:, None, :, None]
    weights = (0.25 * query @ key.mT).masked_fill(~seen, -torch.inf).softmax(-1)
    error = (got - weights @ value).abs().amax(-1).nan_to_num(torch.inf)  # [n, Hkv, R]
    item, head, row = (error == error.max()).nonzero()[0].tolist()
    says = f"query {row} of item {item}, KV head {head}, is {error.max():.3g} off: each item and head has K, V and positions of its own"
    assert error.max() < 1e-5, says


def test_each_query_and_head_has_a_largest_score_of_its_own() -> None:
    """Scores about 300, 0 and -300 beside each other, in an order that changes from tile to tile."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, size, 2, generator=generator) for size in (3, 2 * CONTEXT, 2 * CONTEXT))
    query[..., 0] = torch.tensor([[[300.0, 0, -300], [-300, 300, 0]], [[0, -300, 300], [-300, -300, 300]]])
    key[..., 0] = 1
    positions = torch.full((2, 3), 2 * CONTEXT - 1)
    got = attend_in_tiles(query, key, value, positions, 1.0)
    error = (got - (query.double() @ key.double().mT).softmax(-1) @ value.double()).abs().amax(-1).nan_to_num(torch.inf)
    item, head, row = (error == error.max()).nonzero()[0].tolist()
    says = f"query {row} of item {item}, head {head}, whose scores are about {query[item, head, row, 0]:.0f}, is {error.max():.3g} off"
    assert error.max() < 1e-3, f"{says}: m is the largest score of this query and head"


def test_a_score_may_be_very_low() -> None:
    """Only position 0 is seen, and its score is -40,000. The score of all others would be 0."""
    query, key, value = (torch.zeros(1, 1, size, 2) for size in (1, CONTEXT, CONTEXT))
    query[0, 0, 0, 0], key[0, 0, 0, 0], value[0, 0, 0, 0] = 200.0, -200.0, 1.0
    got = attend_in_tiles(query, key, value, torch.tensor([[0]]), 1.0)[0, 0, 0].tolist()
    says = f"a position that is not seen has the score -inf; with a finite number position 0 is lost: {got}, not [1.0, 0.0]"
    assert got == [1.0, 0.0], says


def test_in_half_precision_only_the_weights_are_rounded() -> None:
    """Weights of 0.5019 become 0.5 in bfloat16: for their product with `value`, not for their sum l."""
    query, key, value = (torch.zeros(1, 1, size, 2, dtype=torch.bfloat16) for size in (1, CONTEXT, CONTEXT))
    query[..., 0], key[:, :, 1:, 0], value[:] = 1.0, -1.0, 1.0
    got = attend_in_tiles(query, key, value, torch.tensor([[CONTEXT - 1]]), -log(0.5019))
    assert got.dtype == torch.bfloat16, f"the result is {got.dtype}, not of the dtype of value, bfloat16"
    found = got[0, 0, 0, 0].item()
    says = f"acc is 1 + 63 * 0.5, and l 1 + 63 * 0.5019: rounded to bfloat16 acc / l is 0.99609375, not {found}"
    assert found == 0.99609375, says


def test_in_half_precision_acc_is_float32() -> None:
    """A tile of 256, then seven of 0.5: in bfloat16 64 * 256 + 32 is 64 * 256 again."""
    query, key = (torch.zeros(1, 1, size, 2, dtype=torch.bfloat16) for size in (1, 8 * CONTEXT))
    value = torch.full_like(key, 0.5)
    value[:, :, :CONTEXT] = 256.0
    found = attend_in_tiles(query, key, value, torch.tensor([[8 * CONTEXT - 1]]), 1.0)[0, 0, 0, 0].item()
    assert found == 32.5, f"(256 + 7 * 0.5) / 8 is 32.5 in bfloat16, not {found}: acc is float32 until it is divided"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_l_is_float32(dtype: torch.dtype) -> None:
    """A tile of scores 0 and values 0, then 63 of scores -7 and values 1, each of which adds 0.058 to an l of 64."""
    query, key = (torch.ones(1, 1, size, 1, dtype=dtype) for size in (1, 64 * CONTEXT))
    key[:, :, :CONTEXT], value = 0.0, torch.ones_like(key)
    value[:, :, :CONTEXT] = 0.0
    found = attend_in_tiles(query, key, value, torch.tensor([[64 * CONTEXT - 1]]), -7.0)[0, 0, 0, 0].item()
    part = 63 * exp(-7)
    says = f"acc / l is {64 * part:.2f} / {64 + 64 * part:.2f} = {part / (1 + part):.4f}, not {found:.4f}: l is float32"
    assert found == pytest.approx(part / (1 + part), rel=0.01), says


def test_in_half_precision_scores_are_float32_before_the_scale() -> None:
    """Two products, 40,000 and 39,968, which float16 holds; times 2 it does not, and times 0.01 it holds no difference of 0.32."""
    query, key, value = (torch.zeros(1, 1, size, 2, dtype=torch.float16) for size in (1, CONTEXT, CONTEXT))
    query[..., 0], key[0, 0, 0, 0], key[0, 0, 1, 0], value[0, 0, 0, 0] = 256.0, 156.25, 156.125, 1.0
    for scale in (2.0, 0.0101):
        found = attend_in_tiles(query, key, value, torch.tensor([[1]]), scale)[0, 0, 0, 0].item()
        product = (query[0, 0] @ key[0, 0, :2].T).double()[0] * scale
        right = product.softmax(0)[0].item()
        says = f"scores {product.tolist()} give position 0 the weight {right:.4f}, not {found:.4f}"
        assert found == pytest.approx(right, rel=2e-3), f"{says}: it is float32 before the scale"


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
        says = f"the token at position {140 + i} gets other bits alone than beside others: tiles are the same for both"
        assert torch.equal(attend_in_tiles(alone, key, value, at, 0.25)[:, :, 0], whole[:, :, i]), says
