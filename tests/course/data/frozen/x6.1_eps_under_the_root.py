"""sqrt(variance + eps). Input: deviation 0.001."""

def group_advantages(rewards, eps=1e-6):
    rewards = rewards.float()
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.var(1, correction=0, keepdim=True) + eps).sqrt()
