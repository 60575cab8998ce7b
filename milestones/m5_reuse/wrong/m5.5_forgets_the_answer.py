"""Counts the prompt's tokens alone: after a preemption the answer's are computed one a step."""


def chunk(seq, budget, threshold=0):
    n = min(max(seq.num_prompt_tokens - seq.num_computed_tokens, 1), budget)
    return min(n, threshold) if threshold else n
