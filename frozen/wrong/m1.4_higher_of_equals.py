"""Sorts from the smallest on and drops from there: of equally likely tokens the higher id stays. Input: logits [0, 0], top_p 0.5."""

def apply_top_p_filtering(logits, top_p):
    ordered, ids = logits.sort(dim=-1, stable=True)
    below = ordered.softmax(-1, dtype=torch.float32).cumsum(-1)
    drop = below <= 1 - top_p[:, None]
    drop[:, -1] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, ids, drop), -torch.inf)
