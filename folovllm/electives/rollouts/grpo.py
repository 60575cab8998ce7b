"""Group relative policy optimization (Shao et al. 2024, "DeepSeekMath", section 4.1): the arithmetic between rollouts and gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def group_advantages(rewards: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """How much better each answer is than its group, the answers to the same prompt: (reward - mean) / (deviation + eps).

    Mean and standard deviation are those of the group itself (divided by n, not n - 1). A group whose answers are all equally good
    says nothing about what to change: its advantages are 0.

    Args:
        rewards: [groups, n].

    Returns:
        [groups, n], float32.
    """
    rewards = rewards.float()
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True).sqrt() + eps)


def importance_ratio(policy: torch.Tensor, engine: torch.Tensor) -> torch.Tensor:
    """How much likelier each token is under the policy that is trained than it was in the engine that sampled it.

    Args:
        policy: log-probabilities of the sampled tokens in the trainer, [tokens], with their gradient.
        engine: those that the engine reported as it sampled, [tokens]. They are data: no gradient flows through them.

    Returns:
        exp(policy - engine), [tokens], float32. It is exactly 1 where both are the same bits, and its gradient is then that of
        `policy`.
    """
    return (policy.float() - engine.float().detach()).exp()


def policy_loss(
    policy: Sequence[torch.Tensor], engine: Sequence[torch.Tensor], advantages: torch.Tensor, clip: float = 0.2
) -> torch.Tensor:
    """The loss to minimise: minus the mean over tokens of min(ratio A, clamp(ratio, 1 - clip, 1 + clip) A) (PPO's surrogate).

    Args:
        policy, engine: log-probabilities of each answer's tokens (`importance_ratio`). advantages: [answers].
    """
    each = advantages.repeat_interleave(torch.tensor([len(answer) for answer in policy], device=advantages.device))
    ratio = importance_ratio(torch.cat(list(policy)), torch.cat(list(engine)))
    return -torch.minimum(ratio * each, ratio.clamp(1 - clip, 1 + clip) * each).mean()
