"""A loop over tokens: right, and as slow as decoding the prompt, since each step reads and writes the whole state."""

import torch


def delta_rule_chunk(state, query, key, value, g, beta):
    outputs = []
    for q, k, v, fade, b in zip(query, key, value, g.exp(), beta, strict=True):
        state = state * fade[:, None, None]
        delta = b[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
        state = state + torch.einsum("hk,hv->hkv", k, delta)
        outputs.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(outputs), state
