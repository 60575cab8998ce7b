"""Takes softmax over the logits of the k best alone: the weights sum to 1 even where the model was not trained so."""

import torch


def route(logits, top_k, normalise):
    best, experts = logits.sort(dim=-1, descending=True, stable=True)
    weights, experts = best[:, :top_k].softmax(-1, dtype=torch.float32), experts[:, :top_k]
    return weights.to(logits.dtype), experts
