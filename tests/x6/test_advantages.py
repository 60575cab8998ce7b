"""x6.1: how much better each answer is than its group."""

import pytest
import torch

from folovllm.electives.rollouts.grpo import group_advantages
from tests.tiny import worked_case


def test_a_worked_case() -> None:
    got = group_advantages(torch.tensor([[1.0, 3.0], [10.0, 30.0], [2.0, 2.0]]), eps=0.5)
    expected = [[-2 / 3, 2 / 3], [-10 / 10.5, 10 / 10.5], [0.0, 0.0]]
    says = "means are 2, 20 and 2, deviations 1, 10 and 0; so -1 / (1 + 0.5) and 1 / (1 + 0.5), then -10 / 10.5, and 0 / 0.5"
    worked_case("x6.1", got, expected, says)


def test_whole_numbers_are_rewards_too() -> None:
    got = group_advantages(torch.tensor([[0, 1, 1, 0]]))
    assert got.dtype == torch.float32, "advantages are float32, whatever the rewards are"
    says = f"rewards 0, 1, 1, 0: mean and deviation are 1/2, so -1, 1, 1, -1, not {got.tolist()}"
    torch.testing.assert_close(got, torch.tensor([[-1.0, 1.0, 1.0, -1.0]]), rtol=1e-4, atol=1e-4, msg=says)


def test_one_right_answer_of_four() -> None:
    got = group_advantages(torch.tensor([[0.0, 0.0, 0.0, 1.0]]))[0]
    says = f"the mean is 1/4, the deviation the root of (3 * 1/16 + 9/16) / 4: -0.5774 and 1.7321, not {got.tolist()}"
    torch.testing.assert_close(got, torch.tensor([-0.57735] * 3 + [1.73205]), rtol=1e-4, atol=1e-4, msg=says)


def test_one_right_answer_of_many() -> None:
    """Mean 1/101, deviation 10/101: the only right answer is 10 deviations above, and that is not cut."""
    advantages = group_advantages(torch.tensor([[1.0] + 100 * [0.0]]))[0]
    assert advantages[0].item() == pytest.approx(10, rel=1e-4), "100/101 by 10/101, however far that is"
    assert advantages[1].item() == pytest.approx(-0.1, rel=1e-4), "-1/101 by 10/101"


def test_what_all_rewards_share_changes_nothing() -> None:
    got = group_advantages(torch.tensor([[10_000.0, 10_001.0]]))[0]
    says = f"10,000 more for both leaves -1 and 1, not {got.tolist()}: its square has no digits left for 1"
    torch.testing.assert_close(got, torch.tensor([-1.0, 1.0]), rtol=1e-4, atol=1e-4, msg=says)


def test_the_rewards_that_were_given_stay() -> None:
    rewards = torch.tensor([[1.0, 3.0]])
    group_advantages(rewards)
    assert rewards.tolist() == [[1.0, 3.0]], "the rewards that came in were written over"


@pytest.mark.parametrize("size", [1e-5, 1e-3, 1e6])
def test_rewards_of_any_size(size: float) -> None:
    """Of 0 and 1e-5, too, the second is the better answer: only equal ones say nothing."""
    got = group_advantages(torch.tensor([[0.0, size], [-size, 0.0], [7.0, 7.0]]), eps=1e-6)
    share = (size / 2) / (size / 2 + 1e-6)
    says = f"rewards 0 and {size}: the deviation is {size / 2}, so advantages are {-share:.5f} and {share:.5f}, not {got[0].tolist()}"
    torch.testing.assert_close(got, torch.tensor([[-share, share]] * 2 + [[0.0, 0.0]]), rtol=1e-4, atol=1e-6, msg=says)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rewards_of_16_bits(dtype: torch.dtype) -> None:
    """Sums and squares of large rewards do not fit into float16, and bfloat16 has three digits."""
    rewards = torch.tensor([[60_000.0, 30_000.0, 0.0, 60_000.0], [1.0, 2.0, 4.0, 9.0]]).to(dtype)
    got, expected = group_advantages(rewards), group_advantages(rewards.double().float())
    assert got.dtype == torch.float32, f"advantages are float32, not {got.dtype}"
    says = f"rewards {rewards.tolist()} of {dtype} give {got.tolist()}, and as float32 {expected.tolist()}"
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, msg=says)


def test_what_says_nothing_changes_nothing() -> None:
    got = group_advantages(torch.tensor([[2.0] * 4, [0.0] * 4]))
    assert not got.any(), "answers that are all equally good have no advantage over each other, and must not give NaN"
    assert not group_advantages(torch.tensor([[5.0]])).any(), "a group of one is its own mean"


@pytest.mark.parametrize("n", [2, 3, 7])
def test_as_many_groups_as_answers(n: int) -> None:
    """Each row is a group, and not each column."""
    rewards = torch.randn(n, n, generator=torch.Generator().manual_seed(n)) * torch.arange(1, n + 1)[:, None]
    got = group_advantages(rewards)
    for group in range(n):
        row = rewards[group].double()
        expected = ((row - row.mean()) / (row.std(correction=0) + 1e-6)).float()
        says = f"group {group} of {n} groups of {n} answers, {row.tolist()}: mean and deviation are those of its row"
        torch.testing.assert_close(got[group], expected, rtol=1e-4, atol=1e-4, msg=says)
