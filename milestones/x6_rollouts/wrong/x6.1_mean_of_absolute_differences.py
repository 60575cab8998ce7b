"""Divides by the mean of absolute differences. A group's deviation is the root of the mean of squares: one right answer of four counts less."""


def group_advantages(rewards, eps):
    rewards = rewards.float()
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (centred.abs().mean(1, keepdim=True) + eps)
