"""Divides by the sum of the weights: what the router said of that is undone, and the layer's output has another size."""

import torch


def combine(answers, weights):
    weights = weights.float() / weights.float().sum(-1, keepdim=True)
    return torch.einsum("tkh,tk->th", answers.float(), weights).to(answers.dtype)
