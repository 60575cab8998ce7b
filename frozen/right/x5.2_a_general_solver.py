"""A general solver in place of the triangular one, heads first."""

def delta_rule_chunk(state, query, key, value, g, beta):
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    c, b = g.T.cumsum(1), beta.T
    gap = c[:, :, None] - c[:, None, :]
    n = c.shape[1]
    lower = torch.ones(n, n, dtype=torch.bool, device=c.device).tril()
    fade = torch.where(lower, gap, -torch.inf).exp()
    strict = fade * (~torch.eye(n, dtype=torch.bool, device=c.device))
    system = torch.eye(n, device=c.device) + b[..., None] * strict * (k @ k.transpose(1, 2))
    right = b[..., None] * (v - c.exp()[..., None] * (k @ state))
    d = torch.linalg.solve(system, right)
    out = c.exp()[..., None] * (q @ state) + (fade * (q @ k.transpose(1, 2))) @ d
    left = (c[:, -1:] - c).exp()
    after = c[:, -1].exp()[:, None, None] * state + (k * left[..., None]).transpose(1, 2) @ d
    return out.transpose(0, 1), after
