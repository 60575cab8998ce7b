"""Folds the chunk into the caller's own state: a snapshot may be in the same memory."""

import torch


def delta_rule_chunk(state, query, key, value, g, beta):
    query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    c, beta = g.cumsum(0).T, beta.T[..., None]
    decay = (c[:, :, None] - c[:, None, :]).masked_fill(~lower_triangle(len(g), g.device), -torch.inf).exp()
    since_start, until_end = c.exp()[..., None], (c[:, -1:] - c).exp()[..., None]
    system = beta * (key @ key.mT) * decay
    rhs = beta * (value - since_start * (key @ state))
    delta = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    out = since_start * (query @ state) + ((query @ key.mT) * decay) @ delta
    state *= since_start[:, -1:]
    state += (until_end * key).mT @ delta
    return out.transpose(0, 1), state
