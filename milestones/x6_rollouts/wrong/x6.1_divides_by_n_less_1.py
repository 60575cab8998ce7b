"""Takes torch's deviation, which divides by n - 1: it is that of a sample, not of the group, and NaN for a group of one."""


def group_advantages(rewards, eps):
    rewards = rewards.float()
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + eps)
