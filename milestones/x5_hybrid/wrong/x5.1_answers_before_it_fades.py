"""Compares the value with what the state held before it faded: the answer for the key misses the value, even with beta 1."""

import torch


def delta_rule_step(state, query, key, value, g, beta):
    delta = beta[..., None] * (value - torch.einsum("shk,shkv->shv", key, state))
    state = state * g.exp()[..., None, None] + torch.einsum("shk,shv->shkv", key, delta)
    return torch.einsum("shk,shkv->shv", query, state), state
