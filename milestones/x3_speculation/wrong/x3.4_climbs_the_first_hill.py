"""Takes the width before the first fall of the speed: behind a step that is slower a faster one is never found."""


def best_draft_lengths(hits, acceptances, cost, most, margin=1.0):
    num_seqs = len(hits)
    worth = acceptances[:, None] ** np.arange(1, most + 1)
    order = np.argsort(-worth, axis=None, kind="stable")
    seq, depth = order // most, order % most + 1
    tokens = num_seqs + np.cumsum(hits[seq] * worth.ravel()[order])
    width = num_seqs + np.cumsum(hits[seq])
    speed = tokens / cost.of_speculative(width, np.maximum.accumulate(depth), hits)
    best = 0
    while best + 1 < len(speed) and speed[best + 1] >= speed[best]:
        best += 1
    if speed[best] <= margin * num_seqs / cost.of_plain(num_seqs):
        return [0] * num_seqs
    return np.bincount(seq[: best + 1], minlength=num_seqs).tolist()
