"""The highest id where several are best."""


def best_of_ranks(scores, ids):
    best = scores.amax(0)
    return best, torch.where(scores == best, ids, -1).amax(0)
