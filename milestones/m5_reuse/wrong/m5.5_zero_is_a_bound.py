"""Takes the threshold at its word when it is 0, which means that there is none: nothing is ever scheduled."""


def chunk(seq, budget, threshold=0):
    return min(seq.num_uncomputed_tokens, budget, threshold)
