"""Counts all positions that are equal, also behind a wrong guess: those were sampled after a token that is not in the text."""


def accept(sampled, guesses):
    right = sum(one == other for one, other in zip(sampled, guesses))
    return list(sampled[: right + 1])
