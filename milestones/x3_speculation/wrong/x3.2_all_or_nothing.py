"""Takes all guesses if all are right, else none of them: right guesses before the first wrong one are lost."""


def accept(drawn, guesses):
    return list(drawn if list(drawn[: len(guesses)]) == list(guesses) else drawn[:1])
