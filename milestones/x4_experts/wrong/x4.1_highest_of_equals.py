"""Sorts upwards and reads from the end: of experts that suit a token equally well the highest is asked, not the lowest."""

import torch


def route(logits, top_k, normalise):
    weights, experts = logits.softmax(-1, dtype=torch.float32).sort(dim=-1, stable=True)
    weights, experts = weights.flip(-1)[:, :top_k], experts.flip(-1)[:, :top_k]
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), experts
