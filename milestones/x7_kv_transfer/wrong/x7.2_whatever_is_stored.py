"""Brings back whatever is stored, up to the first gap: from a slow disk that takes longer than computing."""


def blocks_to_load(places, first, block_bytes, block_size, rates, compute_rate):
    last = first
    while last < len(places) and places[last] is not None:
        last += 1
    return range(first, last)
