"""The widest bucket where none holds them. Input: 9 sequences, buckets [4, 8]."""

def choose_bucket(num_seqs, buckets):
    return next((b for b in buckets if b >= num_seqs), buckets[-1] if buckets else 0)
