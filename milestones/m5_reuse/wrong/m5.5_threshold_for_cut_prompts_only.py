"""Heeds the threshold only where the budget cuts the prompt: with a large budget one long prompt takes the whole step."""


def chunk(seq, budget, threshold=0):
    n = min(seq.num_uncomputed_tokens, budget)
    return min(n, threshold) if threshold and n < seq.num_uncomputed_tokens else n
