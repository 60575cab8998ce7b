"""Takes the time to compute one token for that of a block: hardly anything seems worth bringing."""


def blocks_to_load(places, first, block_bytes, block_size, rates, compute_rate):
    best, last, saved = 0.0, first, 0.0
    for i in range(first, len(places)):
        if places[i] is None:
            break
        saved += 1 / compute_rate - block_bytes / rates[places[i]]
        if saved > best:
            best, last = saved, i + 1
    return range(first, last)
