"""Takes the last width where none is wide enough."""


def choose_bucket(num_seqs, buckets):
    return next((width for width in buckets if width >= num_seqs), buckets[-1] if buckets else 0)
