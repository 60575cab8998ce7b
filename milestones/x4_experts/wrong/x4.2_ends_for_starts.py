"""Looks for the first number above e, not for the first that is not below: each expert gets the pairs of the next one."""

import torch


def sort_by_expert(experts, num_experts):
    flat = experts.flatten()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    sorted_experts, order = flat.sort(stable=True)
    borders = torch.arange(num_experts + 1, device=flat.device)
    return order, torch.searchsorted(sorted_experts, borders, right=True)
