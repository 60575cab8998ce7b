"""The decay is clamped below. Input: g = -5."""

def delta_rule_step(state, query, key, value, g, beta):
    state = state * g.clamp(min=-0.7).exp()[..., None, None]
    found = torch.einsum("shk,shkv->shv", key, state)
    state = state + torch.einsum("shk,shv->shkv", key, beta[..., None] * (value - found))
    return torch.einsum("shk,shkv->shv", query, state), state
