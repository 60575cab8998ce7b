"""Pairs of experts below 0 come first, not last; starts say so. Input: experts [[-1, 0]]."""

def sort_by_expert(experts, num_experts):
    numbers, order = experts.flatten().sort(stable=True)
    starts = torch.searchsorted(numbers, torch.arange(num_experts + 1, device=experts.device, dtype=numbers.dtype))
    return order, starts
