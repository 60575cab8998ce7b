"""Adds what the tokens wrote to the state as if they all stood at the chunk's end: early tokens count too much in the next chunk."""

import torch


def delta_rule_chunk(state, query, key, value, g, beta):
    query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    c, beta = g.cumsum(0).T, beta.T[..., None]
    later = torch.ones(len(g), len(g), dtype=torch.bool, device=g.device).triu(1)
    decay = (c[:, :, None] - c[:, None, :]).masked_fill(later, -torch.inf).exp()
    since_start = c.exp()[..., None]
    system = beta * (key @ key.mT) * decay
    rhs = beta * (value - since_start * (key @ state))
    delta = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    out = since_start * (query @ state) + ((query @ key.mT) * decay) @ delta
    return out.transpose(0, 1), since_start[:, -1:] * state + key.mT @ delta
