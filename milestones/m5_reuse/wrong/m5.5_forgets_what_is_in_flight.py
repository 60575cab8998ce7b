"""Subtracts by itself what is computed, and forgets what is in flight: with overlapped steps (M6) a decode gets a token every other step."""


def chunk(seq, budget, threshold=0):
    n = min(seq.num_tokens - seq.num_computed_tokens, budget)
    return min(n, threshold) if threshold else n
