"""Computes softmax and quotient in the dtype of the logits: in bfloat16 each step keeps 8 bits."""


def route(logits, top_k, normalise):
    weights, experts = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k]
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts
