"""Takes all guesses if all are right, else none of them: right guesses before the first wrong one are lost."""


def accept(sampled, guesses):
    return list(sampled if list(sampled[: len(guesses)]) == list(guesses) else sampled[:1])
