"""The product of all experts in one kernel, and the kernels that choose and add up, beside torch's way."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.electives.moe.layers import route, sort_by_expert
from tests import contract

ON = contract.DEVICE
triton = pytest.importorskip("triton")


def by_loop(x: torch.Tensor, weight: torch.Tensor, asked: torch.Tensor, gated: bool) -> torch.Tensor:
    """Each pair by itself, in float32: [T * k, N]."""
    rows = x.float().repeat_interleave(asked.shape[1], 0) if len(x) == len(asked) else x.float()
    answers = torch.stack([weight[e].float() @ row for row, e in zip(rows, asked.flatten().tolist(), strict=True)])
    if not gated:
        return answers
    gate, up = answers.chunk(2, -1)
    return F.silu(gate) * up


SHAPES = [  # T, k, E, N, K
    (1, 2, 4, 24, 40),
    (5, 1, 3, 33, 64),
    (9, 3, 8, 16, 20),
    (7, 2, 5, 40, 129),
    (1, 2, 8, 24, 40),  # so few pairs that each is by itself
    (2, 2, 16, 33, 129),
    *(pytest.param(shape, marks=pytest.mark.gpu) for shape in [
        (1, 8, 128, 768, 2048), (4, 8, 128, 2048, 768), (64, 8, 128, 768, 2048), (777, 8, 128, 96, 2048), (4096, 2, 8, 512, 1000),
    ]),
]  # fmt: skip


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_multiplies_as_a_loop(shape: tuple[int, ...], gated: bool) -> None:
    from folovllm.electives.moe.kernels.grouped_linear import grouped_linear

    num_tokens, top_k, num_experts, n, k = shape
    dtype = torch.bfloat16 if k >= 1000 else torch.float32
    x = torch.randn(num_tokens, k).to(ON, dtype)
    weight = (torch.randn(num_experts, n * (2 if gated else 1), k) / k**0.5).to(ON, dtype)
    asked = torch.rand(num_tokens, num_experts).topk(top_k).indices.to(ON)
    order, starts = sort_by_expert(asked, num_experts)
    actual = grouped_linear(x, weight, order, starts, gated)
    expected = by_loop(x, weight, asked, gated).to(dtype)
    tol = {"atol": 3e-2, "rtol": 3e-2} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(actual, expected, **tol)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("shape", [(9, 3, 8, 16, 32), (40, 1, 3, 33, 40), (70, 1, 1, 16, 32)])
def test_boxes_of_weights_give_the_same(shape: tuple[int, ...], gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only Hopper runs, in small tiles: whole ones, those half full, and boxes that reach past the matrix."""
    pytest.importorskip("triton.tools")
    from folovllm.electives.hopper import grouped as hopper

    num_tokens, top_k, num_experts, n, k = shape
    for name, size in {"TILE_M": 32, "REST": 16, "ROWS": 32, "TILE_K": 16}.items():
        monkeypatch.setattr(hopper, name, size)
    x = torch.randn(num_tokens, k).to(ON, torch.float16)
    weight = (torch.randn(num_experts, n * (1 + gated), k) / k**0.5).to(ON, torch.float16)
    asked = torch.rand(num_tokens, num_experts).topk(top_k).indices.to(ON)
    order, starts = sort_by_expert(asked, num_experts)
    actual = hopper.grouped_hopper(x, weight, order, starts, gated, x.new_empty(len(order), n))
    torch.testing.assert_close(actual, by_loop(x, weight, asked, gated).half(), atol=4e-3, rtol=4e-3)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(-1, 3), min_size=0, max_size=40), st.sampled_from([4, 24]))
def test_any_crowd(asked: list[int], num_experts: int) -> None:
    """All at one expert, none at another, none at all; pairs of other ranks' experts leave `out` as it was."""
    from folovllm.electives.moe.kernels.grouped_linear import grouped_linear

    experts = torch.tensor(asked, dtype=torch.int64, device=ON).view(-1, 1)
    x = torch.randn(len(asked), 16, generator=torch.Generator().manual_seed(1)).to(ON)
    weight = torch.randn(num_experts, 8, 16, generator=torch.Generator().manual_seed(2)).to(ON)
    order, starts = sort_by_expert(experts, num_experts)
    out = torch.full((len(asked), 8), 7.0, device=ON)
    actual = grouped_linear(x, weight, order, starts, out=out)
    for row, answer, expert in zip(x, actual, asked, strict=True):
        expected = torch.full((8,), 7.0, device=ON) if expert < 0 else weight[expert] @ row
        torch.testing.assert_close(answer, expected, atol=1e-4, rtol=1e-4)


ROUTED = [  # T, E, k: one chunk of tokens, several, and so many that their counts are read in turns
    (0, 8, 2), (1, 8, 2), (5, 6, 3), (16, 128, 8), (17, 60, 8), (3, 1, 1), (70, 20, 6), (40, 4, 4),
    *(pytest.param(shape, marks=pytest.mark.gpu) for shape in [(64, 128, 8), (1500, 128, 8), (4096, 60, 4), (9000, 8, 2)]),
]  # fmt: skip


@pytest.mark.parametrize("shape", ROUTED)
@pytest.mark.parametrize("normalise", [True, False])
def test_the_kernel_chooses_and_sorts_as_torch(shape: tuple[int, int, int], normalise: bool) -> None:
    """Also of the experts of one rank: the pairs of the others come last. Many logits are equal."""
    from folovllm.electives.moe.kernels.route import choose

    num_tokens, num_experts, top_k = shape
    logits = torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(3)).mul(2).round().to(ON)
    for held in (range(num_experts), range(num_experts // 2, num_experts), range(num_experts // 3)):
        weights, experts = route(logits, top_k, normalise)
        own_weights, own_experts, order, starts = choose(logits, top_k, normalise, held)
        torch.testing.assert_close(own_weights, weights)
        assert torch.equal(own_experts, experts)
        wanted_order, wanted_starts = sort_by_expert(experts - held.start, len(held))
        assert torch.equal(order, wanted_order)
        assert torch.equal(starts, wanted_starts)


def test_counts_of_many_chunks_are_read_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    from folovllm.electives.moe.kernels import route as module

    monkeypatch.setattr(module, "STEP", 2)
    monkeypatch.setattr(module, "CHUNK_PAIRS", 16)
    logits = torch.randn(29, 5, generator=torch.Generator().manual_seed(5)).to(ON)
    _, experts, *placed = module.choose(logits, 3, True, range(1, 4))
    for actual, wanted in zip(placed, sort_by_expert(experts - 1, 3), strict=True):
        assert torch.equal(actual, wanted)
