"""Strictly wider: a batch that fits exactly is padded to the next width, and the fullest one fits nowhere."""


def choose_bucket(num_seqs, buckets):
    return next((width for width in buckets if width > num_seqs), 0)
