"""Counts all tokens, not those that are left: the last chunk reaches beyond the end of the text."""


def chunk(seq, budget, threshold=0):
    n = min(seq.num_tokens, budget)
    return min(n, threshold) if threshold else n
