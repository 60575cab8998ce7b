"""Where there is a threshold the budget is not looked at. Input: 10 tokens, budget 4, threshold 8."""

def chunk(seq, budget, threshold=0):
    return min(seq.num_uncomputed_tokens, threshold or budget)
