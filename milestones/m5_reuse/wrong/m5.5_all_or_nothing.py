"""A prompt in one piece, as before: one that is longer than the budget waits for ever."""


def chunk(seq, budget, threshold=0):
    n = seq.num_uncomputed_tokens
    return n if n <= budget else 0
