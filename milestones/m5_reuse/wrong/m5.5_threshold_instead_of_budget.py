"""With a threshold it forgets the budget: two long prompts in one step exceed it."""


def chunk(seq, budget, threshold=0):
    return min(seq.num_uncomputed_tokens, threshold or budget)
