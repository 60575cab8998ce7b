"""A bucket must have one column more... only where num_seqs is 1. Input: 1 sequence, buckets [1, 2]."""

def choose_bucket(num_seqs, buckets):
    return next((b for b in buckets if b >= max(num_seqs, 2)), 0)
