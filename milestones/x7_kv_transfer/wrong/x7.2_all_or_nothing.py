"""Takes the whole run if it saves time in the end, else nothing: a slow tail spoils a fast beginning."""


def blocks_to_load(places, first, block_bytes, block_size, rates, compute_rate):
    saved, last = 0.0, first
    while last < len(places) and places[last] is not None:
        saved += block_size / compute_rate - block_bytes / rates[places[last]]
        last += 1
    return range(first, last if saved > 0 else first)
