"""`var_mean` without correction."""

def group_advantages(rewards, eps=1e-6):
    rewards = rewards.double()
    variance, mean = torch.var_mean(rewards, dim=1, correction=0, keepdim=True)
    equal = (rewards == rewards[:, :1]).all(1, keepdim=True)
    return torch.where(equal, 0.0, (rewards - mean) / (variance.sqrt() + eps)).float()
