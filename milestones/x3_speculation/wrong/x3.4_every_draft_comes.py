"""Counts as if there were a draft each time: a proposer that has one once in a thousand steps seems to pay."""


def best_draft_lengths(hits, acceptances, cost, most, margin=1.0):
    num_seqs = len(hits)
    worth = acceptances[:, None] ** np.arange(1, most + 1)
    order = np.argsort(-worth, axis=None, kind="stable")
    seq, depth = order // most, order % most + 1
    tokens = num_seqs + np.cumsum(worth.ravel()[order])
    width = num_seqs + np.arange(1.0, len(order) + 1)
    speed = tokens / cost.of_speculative(width, np.maximum.accumulate(depth), np.ones(num_seqs))
    best = int(np.argmax(speed))
    if speed[best] <= margin * num_seqs / cost.of_plain(num_seqs):
        return [0] * num_seqs
    return np.bincount(seq[: best + 1], minlength=num_seqs).tolist()
