"""Begins at block 0 whatever the device has: its own blocks are brought once more."""


def blocks_to_load(places, first, block_bytes, block_size, rates, compute_rate):
    best, last, saved = 0.0, 0, 0.0
    for i in range(len(places)):
        if places[i] is None:
            break
        saved += block_size / compute_rate - block_bytes / rates[places[i]]
        if saved > best:
            best, last = saved, i + 1
    return range(last)
