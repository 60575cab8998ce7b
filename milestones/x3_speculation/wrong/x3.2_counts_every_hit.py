"""Counts all positions that are equal, also behind a wrong guess: those were drawn after a token that is not in the text."""


def accept(drawn, guesses):
    right = sum(one == other for one, other in zip(drawn, guesses))
    return list(drawn[: right + 1])
