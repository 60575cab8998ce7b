"""x4.4: what a token's experts said, added up."""

import pytest
import torch

from folovllm.electives.moe.layers import combine
from tests import contract
from tests.tiny import worked_case

ON = contract.DEVICE
ANSWERS = [[[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]], [[3.0, 4.0, 5.0], [0.0, 1.0, 2.0]]]  # [T=2, k=2, H=3]
WEIGHTS = [[0.5, 0.1], [1.0, 2.0]]
SUMS = [[1.5, 3.0, 4.5], [3.0, 6.0, 9.0]]
SAYS = "0.5 * 1 + 0.1 * 10 is 1.5; the second token's weights sum to 3, and nothing divides by that: 1 * 3 + 2 * 0"


def test_a_worked_case() -> None:
    answers = torch.tensor(ANSWERS)
    worked_case("x4.4", combine(answers, torch.tensor(WEIGHTS)), SUMS, SAYS)
    assert answers.tolist() == ANSWERS, "the answers that came in were written over"


def test_a_worked_case_of_the_kernel() -> None:
    pytest.importorskip("triton")
    from folovllm.electives.moe.kernels.route import combine as by_kernel

    got = by_kernel(torch.tensor(ANSWERS, device=ON), torch.tensor(WEIGHTS, device=ON))
    worked_case("x4.4 kernel", got, SUMS, SAYS)


def test_tiles_that_reach_past_H() -> None:
    """Six columns in tiles of four. Behind the last row lies what is another's."""
    pytest.importorskip("triton")
    from folovllm.electives.moe.kernels.route import combine_kernel

    generator = torch.Generator().manual_seed(0)
    answers, weights = torch.randn(2, 3, 6, generator=generator), torch.rand(2, 3, generator=generator)
    out = torch.full((20,), 7.0, device=ON)
    combine_kernel[(2, 2)](answers.to(ON), weights.to(ON), out, H=6, TOP_K=3, WIDTH=4)
    assert (out[12:] == 7).all(), f"what lies behind the last row was written over: {out[12:].tolist()}"
    expected, actual = torch.einsum("tkh,tk->th", answers, weights), out[:12].view(2, 6).cpu()
    says = f"program (t, i) has columns 4 i to 4 i + 3 of token t, up to 6: they are {actual.tolist()}, not {expected.tolist()}"
    torch.testing.assert_close(actual, expected, msg=says)


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
def test_in_half_precision_the_sum_is_float32(kernel: bool) -> None:
    """Eight answers of about 1; in float16 each product, each sum and each weight would lose some bits."""
    if kernel:
        pytest.importorskip("triton")
        from folovllm.electives.moe.kernels.route import combine as adds
    else:
        adds = combine
    generator = torch.Generator().manual_seed(0)
    answers = (1 + torch.rand(3, 8, 40, generator=generator)).half().to(ON)
    weights = torch.rand(3, 8, generator=generator).to(ON)
    exact = torch.einsum("tkh,tk->th", answers.double(), weights.double())
    actual = adds(answers, weights)
    assert actual.dtype == torch.float16, "the sum has the dtype of the answers"
    error = ((actual.double() - exact) / exact).abs().max().item()
    assert error <= 1.001 * 2**-11, f"sums are {error:.5f} off; in float32, rounded once: at most {2**-11:.5f}"
