"""Gives everybody at least one token, even of a budget that is used up."""


def chunk(seq, budget, threshold=0):
    n = max(1, min(seq.num_uncomputed_tokens, budget))
    return min(n, threshold) if threshold else n
