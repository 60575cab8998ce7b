"""Takes a deviation under 1e-4 for none. Rewards may be small: of 0 and 1e-4 the second is the better one."""

import torch


def group_advantages(rewards, eps=1e-6):
    centred = rewards.float() - rewards.float().mean(1, keepdim=True)
    deviation = centred.square().mean(1, keepdim=True).sqrt()
    return torch.where(deviation > 1e-4, centred / (deviation + eps), 0.0)
