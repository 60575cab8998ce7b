"""A token's output lacks what it writes itself (j < i). Input: one token, an empty state."""

def delta_rule_chunk(state, query, key, value, g, beta):
    n = len(g)
    c = g.cumsum(0)
    fade = (c[:, None] - c[None]).masked_fill(torch.ones(n, n).triu(1).bool()[..., None], -torch.inf).exp()
    kk = torch.einsum("ihk,jhk->ijh", key, key) * fade
    rest = value - torch.einsum("ihk,hkv->ihv", key, state) * c.exp()[..., None]
    a = torch.eye(n)[..., None] + (beta[:, None] * kk) * torch.ones(n, n).tril(-1)[..., None]
    d = torch.linalg.solve_triangular(a.permute(2, 0, 1), (beta[..., None] * rest).transpose(0, 1), upper=False).transpose(0, 1)
    qk = torch.einsum("ihk,jhk->ijh", query, key) * fade * torch.ones(n, n).tril(-1)[..., None]
    out = torch.einsum("ihk,hkv->ihv", query, state) * c.exp()[..., None] + torch.einsum("ijh,jhv->ihv", qk, d)
    left = (c[-1] - c).exp()
    return out, state * c[-1].exp()[:, None, None] + torch.einsum("jh,jhk,jhv->hkv", left, key, d)
