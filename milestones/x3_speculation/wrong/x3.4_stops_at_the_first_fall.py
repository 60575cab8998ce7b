"""Adds draft tokens as long as the speed grows: behind an expensive first one it never finds the cheap ones."""


def best_draft_lengths(hits, acceptances, cost, most, margin=1.0):
    num_seqs = len(hits)
    worth = acceptances[:, None] ** np.arange(1, most + 1)
    order = np.argsort(-worth, axis=None, kind="stable")
    seq, depth = order // most, order % most + 1
    tokens = num_seqs + np.cumsum(hits[seq] * worth.ravel()[order])
    width = num_seqs + np.cumsum(hits[seq])
    speed = tokens / cost.of_speculative(width, np.maximum.accumulate(depth), hits)
    taken, last = 0, margin * num_seqs / cost.of_plain(num_seqs)
    while taken < len(speed) and speed[taken] > last:
        last = speed[taken]
        taken += 1
    return np.bincount(seq[:taken], minlength=num_seqs).tolist()
