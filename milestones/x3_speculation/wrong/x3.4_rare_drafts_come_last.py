"""Sorts by the chance of a draft times its worth: a token that seldom comes takes little width, too, so worth alone decides."""


def best_draft_lengths(hits, acceptances, cost, most, margin=1.0):
    num_seqs = len(hits)
    worth = acceptances[:, None] ** np.arange(1, most + 1)
    order = np.argsort(-(hits[:, None] * worth), axis=None, kind="stable")
    seq, depth = order // most, order % most + 1
    tokens = num_seqs + np.cumsum(hits[seq] * worth.ravel()[order])
    width = num_seqs + np.cumsum(hits[seq])
    speed = tokens / cost.of_speculative(width, np.maximum.accumulate(depth), hits)
    best = int(np.argmax(speed))
    if speed[best] <= margin * num_seqs / cost.of_plain(num_seqs):
        return [0] * num_seqs
    return np.bincount(seq[: best + 1], minlength=num_seqs).tolist()
