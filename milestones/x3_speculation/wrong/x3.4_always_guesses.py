"""Never asks whether to guess at all: a guess that is never right is checked all the same."""


def best_depths(hits, acceptances, cost, most, margin=1.0):
    num_seqs = len(hits)
    worth = acceptances[:, None] ** np.arange(1, most + 1)
    order = np.argsort(-worth, axis=None, kind="stable")
    seq, depth = order // most, order % most + 1
    tokens = num_seqs + np.cumsum(hits[seq] * worth.ravel()[order])
    width = num_seqs + np.cumsum(hits[seq])
    speed = tokens / cost.of_checked(width, np.maximum.accumulate(depth), hits)
    best = int(np.argmax(speed))
    return np.bincount(seq[: best + 1], minlength=num_seqs).tolist()
