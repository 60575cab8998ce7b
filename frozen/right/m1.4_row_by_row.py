"""A loop over rows, with topk and a running sum in Python's order."""

def apply_top_k_filtering(logits, top_k):
    out = logits.clone()
    for row, k in zip(out, top_k.tolist()):
        if 0 < k < logits.shape[1]:
            row[row < row.topk(k).values[-1]] = float("-inf")
    return out

def apply_top_p_filtering(logits, top_p):
    out = torch.full_like(logits, float("-inf"))
    for i in range(len(logits)):
        values, ids = torch.sort(logits[i], descending=True, stable=True)
        probabilities = values.float().softmax(0)
        before = probabilities.cumsum(0) - probabilities
        kept = ids[before < top_p[i]] if top_p[i] < 1 else ids
        out[i, kept] = logits[i, kept]
    return out
