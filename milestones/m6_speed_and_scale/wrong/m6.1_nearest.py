"""The nearest width: half of the time it is too narrow, and sequences are left out."""


def choose_bucket(num_seqs, buckets):
    if not buckets or num_seqs > buckets[-1]:
        return 0
    return min(buckets, key=lambda width: abs(width - num_seqs))
