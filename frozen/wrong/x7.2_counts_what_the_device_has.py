"""What the device's own blocks would have saved counts as a gain of those behind. Input: host, disk with the first on the device: the host block outweighs the disk's loss."""

def blocks_to_load(places, first, block_bytes, block_size, rates, compute_rate):
    saved, best, last = 0.0, 0.0, first
    for i, place in enumerate(places):
        if place is None:
            break
        saved += block_size / compute_rate - block_bytes / rates[place]
        if i >= first and saved > best:
            best, last = saved, i + 1
    return range(first, last)
