"""Takes the variance as the mean of squares less the square of the mean: of large rewards the two cancel, even to NaN."""


def group_advantages(rewards, eps):
    rewards = rewards.float()
    mean = rewards.mean(1, keepdim=True)
    return (rewards - mean) / ((rewards.square().mean(1, keepdim=True) - mean.square()).sqrt() + eps)
