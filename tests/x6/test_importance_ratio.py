"""x6.4: the importance ratio, from the log-probabilities of engine and trainer."""

from math import log

import pytest
import torch

from folovllm.electives.rollouts.grpo import importance_ratio, policy_loss
from tests.tiny import worked_case


def test_a_worked_case() -> None:
    policy = torch.tensor([log(0.5), log(0.1), log(0.25)], requires_grad=True)
    ratio = importance_ratio(policy, torch.tensor([log(0.25), log(0.2), log(0.25)]))
    gradient = torch.autograd.grad(ratio.sum(), policy)[0] if ratio.requires_grad else torch.zeros(3)
    got = {"ratio": ratio.detach(), "gradient": gradient}
    expected = {"ratio": [2.0, 0.5, 1.0], "gradient": [2.0, 0.5, 1.0]}
    says = "0.5 / 0.25, 0.1 / 0.2, 0.25 / 0.25; the derivative of exp(a - b) by a is exp(a - b) itself"
    worked_case("x6.4", got, expected, says)


def test_equal_bits_are_exactly_1_and_still_teach() -> None:
    policy = torch.tensor([-0.1, -3.7, -200.0], requires_grad=True)  # exp(-200) is 0 in float32
    ratio = importance_ratio(policy, policy)
    assert ratio.tolist() == [1.0, 1.0, 1.0], "the difference of equal bits is 0, and exp(0) is 1"
    assert ratio.requires_grad, "the trainer's part must keep its gradient"
    ratio.sum().backward()
    assert policy.grad is not None, "the trainer's part must keep its gradient"
    assert policy.grad.tolist() == [1.0, 1.0, 1.0], "the engine's part is data: with its gradient the two would cancel"


def test_no_gradient_reaches_the_engine() -> None:
    policy, engine = (torch.tensor([-1.0, -2.0], requires_grad=True) for _ in range(2))
    ratio = importance_ratio(policy, engine)
    gradients = torch.autograd.grad(ratio.sum(), (policy, engine), allow_unused=True)
    assert gradients[0] is not None and gradients[0].tolist() == [1.0, 1.0], f"`policy`'s is 1, not {gradients[0]}"
    assert gradients[1] is None or not gradients[1].any(), f"the engine's are data, and have a gradient: {gradients[1]}"
    assert torch.is_grad_enabled() and engine.requires_grad, "the tensor that came in has lost its own gradient"


def test_far_apart_is_not_cut() -> None:
    policy, engine = torch.tensor([-0.5, -9.0], requires_grad=True), torch.tensor([-7.5, -1.0])
    ratio = importance_ratio(policy, engine)
    assert ratio.tolist() == pytest.approx([1096.633, 0.000335463], rel=1e-5), "exp(7), exp(-8): only the loss clips"
    ratio.sum().backward()
    assert policy.grad is not None, "the trainer's part must keep its gradient"
    assert policy.grad.tolist() == pytest.approx(ratio.tolist()), "its gradient is the ratio itself, however large"


def test_half_precision_is_compared_in_float32() -> None:
    policy, engine = torch.tensor([-1.0], dtype=torch.bfloat16), torch.tensor([-1.001])
    ratio = importance_ratio(policy, engine)
    assert ratio.dtype == torch.float32, "the ratio is float32, whatever the trainer computes in"
    assert ratio.item() == pytest.approx(1.0010005, abs=1e-6), "a bfloat16 would have rounded the engine's -1.001 to -1"
    both = importance_ratio(torch.tensor([-3.0]).bfloat16(), torch.tensor([-1 / 128]).bfloat16())
    assert both.item() == pytest.approx(0.0501776, rel=1e-5), "-3 + 1/128 has too many digits for the bfloat16 of both"


def test_the_loss_is_clipped_where_it_has_moved_far() -> None:
    engine = [torch.tensor([log(0.5), log(0.5)])]
    policy = [torch.tensor([log(0.9), log(0.5)], requires_grad=True)]
    loss = policy_loss(policy, engine, torch.tensor([1.0]), clip=0.2)
    assert loss.item() == pytest.approx(-(1.2 + 1.0) / 2), "the first token's ratio is 1.8, and counts as 1.2"
    loss.backward()
    assert policy[0].grad is not None, "the trainer's part must keep its gradient"
    assert policy[0].grad.tolist() == pytest.approx([0.0, -0.5]), "a clipped token has no gradient"
