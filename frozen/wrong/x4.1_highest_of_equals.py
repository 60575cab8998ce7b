"""Sorts from the smallest on and turns that over: of equal ones the highest expert comes first. Input: logits [1, 2, 2]."""

def route(logits, top_k, normalise):
    weights, experts = logits.softmax(-1, dtype=torch.float32).sort(dim=-1, stable=True)
    weights, experts = weights.flip(-1)[:, :top_k], experts.flip(-1)[:, :top_k]
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), experts
