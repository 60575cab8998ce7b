"""A counting sort: a pair's place is the number of pairs that come before it."""

def sort_by_expert(experts, num_experts):
    number = experts.flatten().long()
    number = torch.where((number < 0) | (number >= num_experts), num_experts, number)
    hot = torch.nn.functional.one_hot(number, num_experts + 1)
    before = hot.sum(0).cumsum(0) - hot.sum(0)
    place = (hot.cumsum(0) - 1 + before).gather(1, number[:, None])[:, 0]
    order = torch.empty_like(place).scatter(0, place, torch.arange(len(place), device=place.device))
    return order, before
