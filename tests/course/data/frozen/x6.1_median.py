"""The median in place of the mean. Input: rewards [[0, 0, 1]]."""

def group_advantages(rewards, eps=1e-6):
    rewards = rewards.float()
    return (rewards - rewards.median(1, keepdim=True).values) / (rewards.std(1, correction=0, keepdim=True) + eps)
