"""Whatever fits: the widest always does, and one sequence costs as much as all."""


def choose_bucket(num_seqs, buckets):
    return next((width for width in reversed(buckets) if width >= num_seqs), 0)
