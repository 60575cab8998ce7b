"""Cuts advantages at 3 deviations. Input: one right answer of 101."""


def group_advantages(rewards, eps=1e-6):
    rewards = rewards.float()
    deviation = rewards.std(1, correction=0, keepdim=True)
    return ((rewards - rewards.mean(1, keepdim=True)) / (deviation + eps)).clamp(-3, 3)
