"""The caller's eps is not read. Input: rewards [[0, 1]], eps 0.5."""

def group_advantages(rewards, eps=1e-6):
    rewards = rewards.float()
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, correction=0, keepdim=True) + 1e-6)
