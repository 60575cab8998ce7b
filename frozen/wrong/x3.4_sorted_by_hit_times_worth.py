"""Sorts by hit times worth, though a token that seldom comes costs as seldom. Input: hits [1, 0.2], acceptances [0.5, 0.9]."""

def best_draft_lengths(hits, acceptances, cost, most, margin=1.0):
    num_seqs = len(hits)
    if num_seqs == 0 or most == 0:
        return [0] * num_seqs
    gains = hits[:, None] * acceptances[:, None] ** np.arange(1, most + 1)
    order = np.argsort(-gains.ravel(), kind="stable")
    seqs = order // most
    tokens = num_seqs + gains.ravel()[order].cumsum()
    widths = num_seqs + hits[seqs].cumsum()
    depths = np.maximum.accumulate(order % most + 1)
    rates = tokens / cost.of_speculative(widths, depths, hits)
    best = int(rates.argmax())
    if rates[best] < margin * num_seqs / cost.of_plain(num_seqs):
        return [0] * num_seqs
    return np.bincount(seqs[: best + 1], minlength=num_seqs).tolist()
