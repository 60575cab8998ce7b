"""All heads fade as head 0 does. Input: H = 2 with g [[0, -1]]."""

def delta_rule_step(state, query, key, value, g, beta):
    state = state * g[:, :1].exp()[..., None, None]
    found = torch.einsum("shk,shkv->shv", key, state)
    state = state + torch.einsum("shk,shv->shkv", key, beta[..., None] * (value - found))
    return torch.einsum("shk,shkv->shv", query, state), state
