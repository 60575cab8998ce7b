"""x4.1: which experts a token asks, and how much each of them counts."""

import torch

from folovllm.electives.moe.layers import route
from tests.tiny import worked_case


def test_a_worked_case() -> None:
    logits = torch.tensor([[1.0, 3.0, 5.0, 1.0], [2.0, 4.0, 2.0, 2.0]]).log()  # exp gives these numbers back
    got = {}
    for name, normalise in (("as they are", False), ("divided by their sum", True)):
        weights, experts = route(logits, 2, normalise)
        got[name] = {"weights": weights, "experts": experts}
    expected = {
        "as they are": {"weights": [[0.5, 0.3], [0.4, 0.2]], "experts": [[2, 1], [1, 0]]},
        "divided by their sum": {"weights": [[0.625, 0.375], [2 / 3, 1 / 3]], "experts": [[2, 1], [1, 0]]},
    }
    says = "softmax of the first is 1/10, 3/10, 5/10, 1/10; of the second's three equal ones 0 is the lowest"
    worked_case("x4.1", got, expected, says)


def test_of_equal_ones_the_lowest() -> None:
    """In 16 bits logits are often equal, and every way to route must ask the same experts."""
    _, experts = route(torch.zeros(2, 60), 4, normalise=True)
    assert experts.tolist() == [[0, 1, 2, 3]] * 2, "sixty experts suit both equally well: the first four are asked"


def test_one_expert_a_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 6.0], [5.0, 5.0, 0.0], [0.0, -torch.inf, -torch.inf]])
    for normalise in (False, True):
        weights, experts = route(logits, 1, normalise)
        says = f"k = 1, normalise {normalise}"
        assert experts.tolist() == [[2], [0], [0]], f"{says}: experts 2, 0 (of two equal) and 0, not {experts.tolist()}"
        expected = torch.ones(3, 1) if normalise else logits.softmax(-1).amax(-1, keepdim=True)
        torch.testing.assert_close(weights, expected, msg=f"{says}: {weights.tolist()}, not {expected.tolist()}")


def test_in_half_precision_softmax_is_float32() -> None:
    logits = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, experts = route(logits, 8, normalise=True)
    assert weights.dtype == torch.bfloat16, "the weights have the dtype of the logits"
    assert experts.dtype == torch.int64, "the experts' numbers are int64, as an index is"
    best = logits.double().softmax(-1).topk(8).values
    exact = best / best.sum(-1, keepdim=True)
    error = ((weights.double() - exact) / exact).abs().max().item()
    assert error <= 2**-8, f"weights are {error:.4f} off; in float32, rounded once: at most {2**-8:.4f}"
