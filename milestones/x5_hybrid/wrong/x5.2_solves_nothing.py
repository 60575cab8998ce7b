"""Takes the differences to what the chunk began with: a token does not see what those before it in the chunk have written."""

import torch


def delta_rule_chunk(state, query, key, value, g, beta):
    query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    c, beta = g.cumsum(0).T, beta.T[..., None]
    later = torch.ones(len(g), len(g), dtype=torch.bool, device=g.device).triu(1)
    decay = (c[:, :, None] - c[:, None, :]).masked_fill(later, -torch.inf).exp()
    since_start, until_end = c.exp()[..., None], (c[:, -1:] - c).exp()[..., None]
    delta = beta * (value - since_start * (key @ state))
    delta = torch.linalg.solve_triangular(torch.zeros_like(decay), delta, upper=False, unitriangular=True)
    out = since_start * (query @ state) + ((query @ key.mT) * decay) @ delta
    return out.transpose(0, 1), since_start[:, -1:] * state + (until_end * key).mT @ delta
