"""Writes through `flatten`, which copies nothing: the caller's experts change."""

import torch


def sort_by_expert(experts, num_experts):
    flat = experts.flatten()
    flat.masked_fill_((flat < 0) | (flat >= num_experts), num_experts)
    sorted_experts, order = flat.sort(stable=True)
    return order, torch.searchsorted(sorted_experts, torch.arange(num_experts + 1, device=flat.device))
