"""Running sums of the run, then the first of the largest."""

def blocks_to_load(places, first, block_bytes, block_size, rates, compute_rate):
    from itertools import accumulate, takewhile

    run = list(takewhile(lambda place: place is not None, places[first:]))
    gains = [0.0, *accumulate(block_size / compute_rate - block_bytes / rates[place] for place in run)]
    return range(first, first + gains.index(max(gains)))
