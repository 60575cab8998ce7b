"""Stops at the first block that loses time: the fast blocks behind it, which would pay for it, are computed."""


def blocks_to_load(places, first, block_bytes, block_size, rates, compute_rate):
    last = first
    for place in places[first:]:
        if place is None or block_size / compute_rate <= block_bytes / rates[place]:
            break
        last += 1
    return range(first, last)
