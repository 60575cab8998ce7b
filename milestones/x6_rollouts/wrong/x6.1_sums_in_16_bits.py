"""Adds up rewards of 16 bits in 16 bits: the sum of two of 60,000 is infinite in float16."""


def group_advantages(rewards, eps=1e-6):
    if not rewards.is_floating_point():
        rewards = rewards.float()
    centred = rewards - (rewards.sum(1) / rewards.shape[1])[:, None]
    return (centred / (centred.square().mean(1, keepdim=True).sqrt() + eps)).float()
