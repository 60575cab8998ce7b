"""Passes over a block that is nowhere: what it brings from behind the gap depends on tokens that are not there."""


def blocks_to_load(places, first, block_bytes, block_size, rates, compute_rate):
    best, last, saved = 0.0, first, 0.0
    for i in range(first, len(places)):
        if places[i] is None:
            continue
        saved += block_size / compute_rate - block_bytes / rates[places[i]]
        if saved > best:
            best, last = saved, i + 1
    return range(first, last)
