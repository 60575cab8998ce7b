"""Subtracts the mean of all rewards: every answer to an easy prompt looks good, and every answer to a hard one bad."""


def group_advantages(rewards, eps):
    rewards = rewards.float()
    centred = rewards - rewards.mean()
    return centred / (centred.square().mean(1, keepdim=True).sqrt() + eps)
