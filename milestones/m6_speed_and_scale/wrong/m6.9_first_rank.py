"""The first of equals in the order of ranks, whatever its id."""


def best_of_ranks(scores, ids):
    best, rank = scores.max(0)
    return best, ids.gather(0, rank[None])[0]
