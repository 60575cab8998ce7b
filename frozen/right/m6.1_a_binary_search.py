"""A binary search."""

def choose_bucket(num_seqs, buckets):
    from bisect import bisect_left

    at = bisect_left(buckets, num_seqs)
    return buckets[at] if at < len(buckets) else 0
