"""Stage 4: attention over blocks, one tile at a time."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milestones.mini.given.contract import Limits
from milestones.mini.harness import Tiles
from tests.mini.conftest import Mini, interfered, random_asks


def attended(
    mini: Mini, query: torch.Tensor, kv: torch.Tensor, table: list[int], start: int
) -> tuple[torch.Tensor, int]:
    """What `attend` returns for K/V [2, N, B, Hkv, D] that it reads tile by tile, and how many blocks it read."""
    read = list[int]()
    keys, values = (Tiles(part, read.append) for part in kv)
    with mini.sentence():
        return mini.adapters.attend(query, keys, values, table, start), len(read)


def plain(query: torch.Tensor, kv: torch.Tensor, table: list[int], start: int) -> torch.Tensor:
    """All scores written out, in float64."""
    key, value = (
        kv[:, table].flatten(1, 2)[:, : start + len(query)].double().repeat_interleave(query.shape[1] // kv.shape[3], 2)
    )
    scores = torch.einsum("nhd,mhd->hnm", query.double(), key) / query.shape[2] ** 0.5
    future = torch.arange(len(key)) > torch.arange(start, start + len(query))[:, None]
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)


def test_worked_case(mini: Mini) -> None:
    """One query 1 (D = 1), keys 0 and ln 3 in two blocks of one: weights 1/4 and 3/4, values 0 and 8, so 6."""
    kv = torch.tensor([[torch.nan, 3.0, 1.0], [torch.nan, 8.0, 0.0]]).log().nan_to_num(neginf=0).view(2, 3, 1, 1, 1)
    kv[1] = torch.tensor([torch.nan, 8.0, 0.0]).view(3, 1, 1, 1)
    kv[:, 0] = torch.nan
    out, _ = attended(mini, torch.ones(1, 1, 1), kv, [2, 1], 1)
    assert abs(out.item() - 6) < 1e-5, f"the weights are 1/4 and 3/4 of the values 0 and 8: 6, and not {out.item()}"


def test_a_later_block_with_the_largest_score(mini: Mini) -> None:
    """Scores 0 and 200: e^200 is no float32. What was summed before has to shrink to nothing."""
    kv = torch.tensor([[0.0, 200.0], [5.0, 7.0]]).view(2, 2, 1, 1, 1)
    out, _ = attended(mini, torch.ones(1, 1, 1), kv, [0, 1], 1)
    assert abs(out.item() - 7) < 1e-5, f"the second key has all of the weight: 7, and not {out.item()}"


def test_an_earlier_block_with_the_largest_score(mini: Mini) -> None:
    kv = torch.tensor([[200.0, 0.0, 100.0], [5.0, 7.0, 9.0]]).view(2, 3, 1, 1, 1)
    out, _ = attended(mini, torch.ones(1, 1, 1), kv, [0, 1, 2], 2)
    assert abs(out.item() - 5) < 1e-5, f"the first key has all of the weight: 5, and not {out.item()}"


def test_scores_far_below_zero(mini: Mini) -> None:
    """Scores -200 and -199: e^-200 is 0 in float32. Only the distance to the largest score counts: weights 0.269 and 0.731."""
    kv = torch.tensor([[-200.0, -199.0], [5.0, 7.0]]).view(2, 2, 1, 1, 1)
    out, _ = attended(mini, torch.ones(1, 1, 1), kv, [0, 1], 1)
    assert abs(out.item() - 6.462) < 1e-3, f"0.269 times 5 and 0.731 times 7 are 6.462, and not {out.item()}"


def test_each_query_and_head_has_a_largest_score_of_its_own(mini: Mini) -> None:
    """Query i of head h has scores about 200, 0 or -200 (D = 2, keys 1 and x): under the maximum of another all of its weights are 0."""
    offsets = torch.tensor([[200.0, -200, 0, -200], [-200, 0, 200, 200], [0, 200, -200, 0]])
    query = torch.stack((offsets, torch.ones(3, 4)), -1) * 2**0.5  # [n, Hq, D]
    kv = torch.randn(2, 4, 2, 2, 2)
    kv[0, ..., 0] = 1
    out, _ = attended(mini, query, kv, [2, 0, 3], 3)
    wrong = ~((out - plain(query, kv, [2, 0, 3], 3)).abs().amax(-1) < 1e-3)  # [n, Hq]
    where = [f"query {i} of head {h}, scores about {offsets[i, h]:.0f}" for i, h in wrong.nonzero().tolist()]
    assert not where, f"wrong: {', '.join(where[:3])}: every query and head has a largest score of its own"


def test_the_largest_score_is_of_a_later_position(mini: Mini) -> None:
    """Position p has the score 300 p. Query i does not see what is behind it, so its own position has all of its weight."""
    kv = torch.stack((300.0 * torch.arange(4), torch.tensor([5.0, 7, 9, 11]))).view(2, 1, 4, 1, 1)
    out, _ = attended(mini, torch.ones(4, 1, 1), kv, [0], 0)
    assert out.flatten().tolist() == [5, 7, 9, 11], f"5, 7, 9 and 11 are right, and not {out.flatten().tolist()}"


def test_what_is_behind_the_last_token_is_anything(mini: Mini) -> None:
    """6 tokens in blocks of 4: two slots of the second block hold NaN, and so does a third block of the table."""
    kv = torch.randn(2, 5, 4, 2, 8)
    kv[:, 3, 2:], kv[:, 0] = torch.nan, torch.nan
    query = torch.randn(2, 4, 8)
    out, num_read = attended(mini, query, kv, [1, 3, 0], 4)
    error = float((out - plain(query, kv, [1, 3], 4)).abs().max())
    assert error == error, "the result has NaN: slots behind token 5 hold it, and 0 times NaN is NaN"
    assert error < 1e-4, f"the result is off by {error:.3g} from the softmax of all scores, written out"
    assert num_read == 4, f"{num_read} blocks were read: two of K and two of V hold all tokens"


@settings(max_examples=25)
@given(
    st.integers(1, 9),
    st.integers(0, 20),
    st.integers(1, 5),
    st.sampled_from([(4, 2), (4, 4), (3, 1)]),
    st.integers(0, 99),
)
def test_any_shape(mini: Mini, n: int, start: int, size: int, heads: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(30, generator=generator)[: -(-(n + start) // size)].tolist()
    kv = 4 * torch.randn(2, 30, size, heads[1], 8, generator=generator)
    query = torch.randn(n, heads[0], 8, generator=generator)
    out, num_read = attended(mini, query, kv, table, start)
    wrong = (out - plain(query, kv, table, start)).abs().amax((1, 2))
    assert out.shape == query.shape and (wrong < 1e-4).all(), (
        f"query {int(wrong.nan_to_num(1e9).argmax())} of {n} is off by {float(wrong.max()):.3g}"
    )
    assert num_read <= 2 * len(table), (
        f"{num_read} blocks were read of a table of {len(table)}: each once of K and once of V"
    )


def test_what_attend_returns_is_used(mini: Mini) -> None:
    """The harness adds something to what `attend` returns, in one layer of every third position: the tokens follow that."""
    asks = random_asks([(9, 14), (14, 14), (4, 12)], [0, 2, 3])
    mini.play([interfered(ask, shifted=True) for ask in asks], Limits(24, 4, 3, 64), shifts=True)


def test_bytes_read_in_the_engine(mini: Mini) -> None:
    """Each layer reads a sequence's K and V once a step, for all of its query heads and all of its new tokens."""
    trace = mini.play(random_asks([(9, 8), (14, 8), (3, 10)]), Limits(24, 4, 3, 64))
    wanted = 3 * sum(len(step.work) for step in trace.steps)
    assert trace.num_attended == wanted, (
        f"engine.attend was called {trace.num_attended} times: 3 layers and the steps' sequences make {wanted}"
    )
    assert trace.bytes_read <= 1.05 * trace.least_bytes, (
        f"{trace.bytes_read:,} bytes of K/V were read, and {trace.least_bytes:,} are enough"
    )
    assert trace.bytes_read >= trace.least_bytes, "attend does not read K/V by keys[block] and values[block]"
