"""Advantages are clipped to 3. Input: 15 rewards of 0 and one of 1."""

def group_advantages(rewards, eps=1e-6):
    rewards = rewards.float()
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, correction=0, keepdim=True) + eps)).clamp(-3, 3)
