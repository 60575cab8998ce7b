"""Clamps the numbers of other ranks' experts: our first and our last expert answer tokens that never asked them."""

import torch


def sort_by_expert(experts, num_experts):
    flat = experts.flatten().clamp(0, num_experts - 1)
    sorted_experts, order = flat.sort(stable=True)
    return order, torch.searchsorted(sorted_experts, torch.arange(num_experts + 1, device=flat.device))
