"""The lowest of all ranks' best ids, whatever it scored."""


def best_of_ranks(scores, ids):
    return scores.amax(0), ids.amin(0)
