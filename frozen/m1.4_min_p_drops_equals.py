"""Drops what has exactly `min_p` times the largest probability too, but for one token. Input: min_p 1, two equal logits."""

def apply_min_p_filtering(logits, min_p):
    top = logits.max(-1, keepdim=True)
    drop = logits - top.values <= min_p[:, None].log()
    drop.scatter_(1, top.indices, False)
    return logits.masked_fill(drop, -torch.inf)
