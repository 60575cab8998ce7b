"""What is read is made from what was there before: q S' = a q S + (q . k) d."""

def delta_rule_step(state, query, key, value, g, beta):
    faded = state * g.exp()[..., None, None]
    write = beta[..., None] * (value - (key[..., None, :] @ faded)[..., 0, :])
    read = (query[..., None, :] @ faded)[..., 0, :] + (query * key).sum(-1, keepdim=True) * write
    return read, torch.baddbmm(
        faded.flatten(0, 1), key.flatten(0, 1)[:, :, None], write.flatten(0, 1)[:, None, :]
    ).view_as(state)
