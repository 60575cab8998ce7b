"""One tile of the online softmax, alone: a tile at a time must give what softmax over all keys gives."""

import pytest
import torch
import triton
import triton.language as tl

from folovllm.kernels.online_softmax import LOG2_E, online_softmax_tile
from tests.m4.cases import DEVICE, assert_close
from tests.tiny import worked_case

M, N, D = 16, 16, 16
LOWEST = -1.0e30


@triton.jit
def tile_kernel(
    q_ptr, k_ptr, v_ptr, seen_ptr, max_ptr, sum_ptr, acc_ptr, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    ALL: tl.constexpr = False, ROWS: tl.constexpr = M, KEYS: tl.constexpr = N,
):  # fmt: skip
    """Load a tile and the state [M], [M], [M, D]; store the state that comes back."""
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    q, k = tl.load(q_ptr + m[:, None] * D + d[None, :]), tl.load(k_ptr + n[:, None] * D + d[None, :])
    v = tl.load(v_ptr + n[:, None] * D + d[None, :])
    row, key = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)[None, :]
    # True: a prefill's, before the diagonal. [1, N]: a decode's. [M, 1]: of queries, some of which are padding.
    seen = True if ALL else tl.load(seen_ptr + row * KEYS + key) != 0
    accs = acc_ptr + m[:, None] * D + d[None, :]
    row_max, row_sum, acc = online_softmax_tile(
        q, k, v, seen, tl.load(max_ptr + m), tl.load(sum_ptr + m), tl.load(accs), scale
    )
    tl.store(max_ptr + m, row_max)
    tl.store(sum_ptr + m, row_sum)
    tl.store(accs, acc)


def run(q, keys, values, seen, scale=D**-0.5 * LOG2_E, see_all=False):
    """Fold `keys` and `values` [tiles, N, D] in, masked by `seen` [tiles, M or 1, N or 1]; returns the final state."""
    state = [torch.full((M,), LOWEST), torch.zeros(M), torch.zeros(M, D)]
    state = [x.to(DEVICE) for x in state]
    for k, v, s in zip(keys, values, seen, strict=True):
        tile_kernel[(1,)](
            q, k.contiguous(), v.contiguous(), s.int().contiguous(), *state, scale, M, N, D, see_all, *s.shape
        )
    return state


def reference(q, keys, values, seen):
    """Softmax attention over all tiles at once, float64."""
    k, v, s = keys.flatten(0, 1).double(), values.flatten(0, 1).double(), seen.transpose(0, 1).flatten(1)
    scores = (q.double() @ k.T * D**-0.5).masked_fill(~s, float("-inf"))
    return torch.softmax(scores, -1) @ v, scores


def test_a_worked_case():
    """Three tiles of which the query sees one key each: scores 1, 3, 2 (powers of two, the scale is 1), values 4, 8, 2."""
    q, keys, values = (torch.zeros(*shape, D, device=DEVICE) for shape in ((M,), (3, N), (3, N)))
    q[0, 0], keys[:, 0, 0], values[:, 0, 0] = 1, torch.tensor([1.0, 3.0, 2.0]), torch.tensor([4.0, 8.0, 2.0])
    keys[:, 1, 0], values[:, 1, 0] = 9, 100  # hidden
    seen = torch.zeros(3, M, N, dtype=torch.bool, device=DEVICE)
    seen[:, :, 0] = True
    row_max, row_sum, acc = run(q, keys, values, seen, scale=1.0)
    got = {"row_max": row_max[0], "row_sum": row_sum[0], "acc": acc[0, 0]}
    says = "the largest score is 3, so the weights are 1/4, 1 and 1/2: their sum, and that of 4/4 + 8 + 2/2"
    worked_case("m4.1", got, {"row_max": 3.0, "row_sum": 1.75, "acc": 10.0}, says)


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("spread", [1.0, 8.0, 60.0])
def test_tiles_equal_one_softmax(tiles, spread):
    """Also where a later tile raises the maximum by so much that exp without subtracting it would overflow."""
    torch.manual_seed(tiles)
    q, keys, values = (torch.randn(*s, D, device=DEVICE) for s in ((M,), (tiles, N), (tiles, N)))
    keys *= spread * torch.arange(1, tiles + 1, device=DEVICE)[:, None, None]
    seen = torch.rand(tiles, M, N, device=DEVICE) < 0.7
    seen[0, :, 0] = True
    row_max, row_sum, acc = run(q, keys, values, seen)
    expected, scores = reference(q, keys, values, seen)
    assert_close(acc / row_sum[:, None], expected, says="acc / row_sum")
    assert_close(row_max / LOG2_E, scores.amax(-1), says="row_max")
    assert_close(row_sum, (scores - scores.amax(-1, keepdim=True)).exp().sum(-1), says="row_sum")


def test_rows_that_see_nothing_keep_no_weight():
    """A wholly hidden tile changes nothing, before and after a visible one, and is no NaN."""
    q, keys, values = (torch.randn(*s, D, device=DEVICE) for s in ((M,), (3, N), (3, N)))
    seen = torch.zeros(3, M, N, dtype=torch.bool, device=DEVICE)
    seen[1, : M // 2] = True
    row_max, row_sum, acc = run(q, keys, values, seen)
    assert (row_sum[M // 2 :] == 0).all() and (acc[M // 2 :] == 0).all() and (row_max[M // 2 :] == LOWEST).all(), (
        "a query that sees no key keeps the state that it had"
    )
    expected, _ = reference(q[: M // 2], keys[1:2], values[1:2], seen[1:2, : M // 2])
    assert_close((acc / row_sum[:, None])[: M // 2], expected)


def test_visible_may_be_true():
    """Python's `True`, and no tensor: every query sees every key of the tile."""
    q, keys, values = (torch.randn(*s, D, device=DEVICE) for s in ((M,), (2, N), (2, N)))
    seen = torch.ones(2, M, N, dtype=torch.bool, device=DEVICE)
    _, row_sum, acc = run(q, keys, values, seen, see_all=True)
    assert_close(acc / row_sum[:, None], reference(q, keys, values, seen)[0])


@pytest.mark.parametrize("shape", [(1, N), (M, 1), (1, 1)])
def test_visible_may_have_one_row_or_one_column(shape):
    """One row for all queries, as in a decode; one column where a query sees all keys or none."""
    q, keys, values = (torch.randn(*s, D, device=DEVICE) for s in ((M,), (2, N), (2, N)))
    seen = torch.ones(2, *shape, dtype=torch.bool, device=DEVICE)
    seen.flatten()[1::3] = False
    row_max, row_sum, acc = run(q, keys, values, seen)
    whole = seen.expand(2, M, N)
    sees = whole.any(2).any(0)
    says = f"`visible` of shape {[*shape]} is broadcast to [{M}, {N}]"
    expected, scores = reference(q, keys, values, whole)
    assert_close((acc / row_sum[:, None])[sees], expected[sees], says=says)
    assert_close(row_max[sees] / LOG2_E, scores[sees].amax(-1), says=f"{says}, row_max")
    assert (row_sum[~sees] == 0).all(), f"{says}: queries that see nothing keep the sum 0"


def test_float32_is_not_rounded_to_tf32(like_a_gpu):
    """Both products say `input_precision="ieee"`: on a GPU the default keeps ten bits of mantissa."""
    q, keys, values = (torch.randn(*s, D, device=DEVICE) for s in ((M,), (2, N), (2, N)))
    seen = torch.ones(2, M, N, dtype=torch.bool, device=DEVICE)
    _, row_sum, acc = run(q, keys, values, seen)
    assert_close(acc / row_sum[:, None], reference(q, keys, values, seen)[0])


def test_weights_are_as_exact_as_the_values():
    """Float16 queries and keys, float32 values: the product takes the weights as they are."""
    q, keys, values = (torch.randn(*s, D, device=DEVICE) for s in ((M,), (1, N), (1, N)))
    q, keys = q.half(), keys.half()
    seen = torch.ones(1, M, N, dtype=torch.bool, device=DEVICE)
    _, row_sum, acc = run(q, keys, values, seen)
    expected = reference(q, keys, values, seen)[0]
    error = ((acc / row_sum[:, None] - expected).norm() / expected.norm()).item()
    assert error < 1e-5, f"off by {error:.1e}: weights are rounded to the values' dtype, not the queries'"


def test_weights_are_rounded_for_their_product_only():
    """Float16 keys and values: the product takes float16 weights, the sum takes them as they were, in float32."""
    q, keys, values = (torch.randn(*s, D, device=DEVICE).half() for s in ((M,), (1, N), (1, N)))
    seen = torch.ones(1, M, N, dtype=torch.bool, device=DEVICE)
    _, row_sum, acc = run(q, keys, values, seen)
    scores = reference(q, keys, values, seen)[1]
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    assert_close(row_sum, weights.sum(-1), says="row_sum adds the weights in float32, rounded by nobody")
    expected = weights.half().double() @ values[0].double()
    assert (acc - expected).norm() / expected.norm() < 5e-5, (
        "only the weights that go into the product with float16 values are rounded to float16"
    )  # 2e-4 were nothing rounded; one weight rounded otherwise: 3e-5
