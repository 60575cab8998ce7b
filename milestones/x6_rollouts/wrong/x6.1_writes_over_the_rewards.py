"""Subtracts in place: `float` copies nothing where rewards are float32 already, so the caller's rewards are gone."""


def group_advantages(rewards, eps):
    rewards = rewards.float()
    rewards -= rewards.mean(1, keepdim=True)
    return rewards / (rewards.square().mean(1, keepdim=True).sqrt() + eps)
