"""x4.3: tiles of the grouped product: whose each of them is, and what it computes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import contract
from tests.tiny import worked_case

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from folovllm.electives.moe.kernels.grouped_linear import grouped_linear, multiply_tile  # noqa: E402
from folovllm.kernels.grouped_tiles import find_tile  # noqa: E402

ON = contract.DEVICE


@triton.jit
def find_kernel(starts_ptr, out_ptr, E: tl.constexpr, WIDTH: tl.constexpr, TILE_M: tl.constexpr):
    """What `find_tile` says of the tile that has the program's number."""
    tile = tl.program_id(0)
    expert, begin, end = find_tile(starts_ptr, tile, E, WIDTH, TILE_M)
    tl.store(out_ptr + tile * 3, expert.to(tl.int64))
    tl.store(out_ptr + tile * 3 + 1, begin.to(tl.int64))
    tl.store(out_ptr + tile * 3 + 2, end.to(tl.int64))


def tiles(starts: list[int], tile_m: int, num_tiles: int) -> list[list[int]]:
    """(expert, first place, end) of each tile; [expert] alone where there is none."""
    num_experts = len(starts) - 1
    out = torch.empty(num_tiles, 3, dtype=torch.int64, device=ON)
    width = triton.next_power_of_2(num_experts)
    find_kernel[(num_tiles,)](torch.tensor(starts, device=ON), out, num_experts, width, tile_m)
    return [row if row[0] < num_experts else row[:1] for row in out.tolist()]


@triton.jit
def multiply_kernel(
    x_ptr, matrix_ptr, token_ptr, out_ptr, num_pairs, N, K: tl.constexpr, GATED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One tile of 16 pairs and 16 outputs; its gate's part and its up part one behind the other."""
    place, n = tl.arange(0, TILE), tl.arange(0, TILE)
    inside = place < num_pairs
    token = tl.load(token_ptr + place, mask=inside, other=0)
    rows = tl.where(n < N, n, 0)
    total, total_up = multiply_tile(x_ptr, matrix_ptr, token, inside, rows, N, K, GATED, TILE, "ieee")
    tl.store(out_ptr + place[:, None] * TILE + n[None, :], total)
    tl.store(out_ptr + TILE * TILE + place[:, None] * TILE + n[None, :], total_up)


def test_a_worked_case_of_the_tiles() -> None:
    says = (
        "tiles of four places; expert 0 has 3 pairs, so one tile; expert 1 has none; expert 2 has 5, places 3 to 7, "
        "so a tile from 3 and one from 7; expert 3 has place 8; tiles 4 and 5 there are not"
    )
    expected = [[0, 0, 3], [2, 3, 8], [2, 7, 8], [3, 8, 9], [4], [4]]
    worked_case("x4.3 tiles", tiles([0, 3, 3, 8, 9], 4, 6), expected, says)


def test_a_worked_case_of_the_product() -> None:
    """Around x and the matrix lie other numbers, as they do in memory; K is 20, and a tile takes 16 at a time.

    The fourth pair is not there.
    """
    x = torch.full((8, 20), 1000.0, device=ON)
    x[:3] = torch.tensor([1.0, 2.0, 3.0], device=ON)[:, None]
    matrix = torch.full((8, 20), 1000.0, device=ON)
    matrix[:4] = torch.tensor([1.0, 10.0, 2.0, 20.0], device=ON)[:, None]  # gate's two rows, then up's
    token = torch.tensor([2, 0, 2], dtype=torch.int32, device=ON)
    out = torch.empty(2, 16, 16, device=ON)
    multiply_kernel[(1,)](x, matrix, token, out, 3, 2, 20, True, 16)
    says = "rows 2, 0 and 2 of x are 3, 1 and 3 throughout; gate's rows 1 and 10, up's 2 and 20: 20 products each, 20 * 3 * 1"
    expected = {"gate": [[60.0, 600.0], [20.0, 200.0], [60.0, 600.0]]}
    expected["up"] = [[120.0, 1200.0], [40.0, 400.0], [120.0, 1200.0]]
    worked_case("x4.3 product", {"gate": out[0, :3, :2], "up": out[1, :3, :2]}, expected, says)
    assert not out[:, 3].any(), "a pair that is not there reads nothing: its products are 0"


def test_what_is_not_asked_for_is_0() -> None:
    """Without GATED there is no up. Behind the matrix lies NaN, of which 0 times is NaN, too."""
    x, matrix = torch.ones(8, 20, device=ON), torch.full((8, 20), float("nan"), device=ON)
    matrix[:2] = 1.0
    token, out = torch.zeros(3, dtype=torch.int32, device=ON), torch.empty(2, 16, 16, device=ON)
    multiply_kernel[(1,)](x, matrix, token, out, 3, 2, 20, False, 16)
    got = out[0, :3, :2].tolist()
    assert got == [[20.0, 20.0]] * 3, f"behind the 20th number of a row nothing of the matrix is read: {got}, not 20s"
    assert not out[1].any(), "where there is no up, its products are zeros"


def test_in_half_precision_the_sum_is_float32() -> None:
    """16 products of 128 are 2,048, beside which float16 has no 1."""
    x, matrix = torch.ones(8, 20, device=ON).half(), torch.full((8, 20), 128.0, device=ON).half()
    matrix[:, 16:] = 0.25
    token, out = torch.zeros(3, dtype=torch.int32, device=ON), torch.empty(2, 16, 16, device=ON)
    multiply_kernel[(1,)](x, matrix, token, out, 3, 2, 20, True, 16)
    found = out[:, 0, 0].tolist()
    assert found == [2049.0, 2049.0], f"16 * 128 + 4 * 0.25 is 2049 in float32; gate and up are {found}"


@settings(max_examples=10)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_each_place_lies_in_one_tile(crowds: list[int]) -> None:
    starts = [sum(crowds[:e]) for e in range(len(crowds) + 1)]
    num_tiles = sum(-(-n // 4) for n in crowds)
    found = tiles(starts, 4, num_tiles + 1)
    expected = [[e, p, starts[e + 1]] for e in range(len(crowds)) for p in range(starts[e], starts[e + 1], 4)]
    expected.append([len(crowds)])
    assert found == expected, f"of {crowds} pairs tiles of 4 (expert, first place, end) are {expected}, not {found}"


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_kernel_of_such_tiles(gated: bool) -> None:
    """33 outputs and 40 numbers a row: neither fills whole tiles. Most pairs crowd at one expert."""
    generator = torch.Generator().manual_seed(0)
    asked = torch.tensor([1] * 17 + [0, 3, 3], device=ON)  # one expert a token; expert 2 has none
    x = torch.randn(20, 40, generator=generator).to(ON)
    weight = torch.randn(4, 66 if gated else 33, 40, generator=generator).to(ON)
    order, starts = asked.argsort(stable=True), torch.tensor([0, 1, 18, 18, 20], device=ON)
    actual = grouped_linear(x, weight, order, starts, gated)
    expected = torch.stack([weight[e] @ row for row, e in zip(x, asked.tolist(), strict=True)])
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
    error = (actual - expected).abs().max().item()
    assert error < 1e-3, f"outputs are {error:.3g} off those of a loop over tokens"
