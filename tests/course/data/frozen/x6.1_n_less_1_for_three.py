"""A group of one answer. Deviation is of n - 1 where n > 2. Input: rewards [[1, 2, 6]]."""

def group_advantages(rewards, eps=1e-6):
    rewards = rewards.float()
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, correction=int(rewards.shape[1] > 2), keepdim=True) + eps)
