"""beta scales what is taken away, not what is written. Input: beta = 0.5, an empty state."""

def delta_rule_step(state, query, key, value, g, beta):
    state = state * g.exp()[..., None, None]
    found = torch.einsum("shk,shkv->shv", key, state)
    state = state + torch.einsum("shk,shv->shkv", key, value - beta[..., None] * found)
    return torch.einsum("shk,shkv->shv", query, state), state
