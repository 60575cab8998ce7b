"""Returns the inverse: at which place each pair stands, not which pair stands at each place."""

import torch


def sort_by_expert(experts, num_experts):
    flat = experts.flatten()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    sorted_experts, order = flat.sort(stable=True)
    return order.argsort(), torch.searchsorted(sorted_experts, torch.arange(num_experts + 1, device=flat.device))
