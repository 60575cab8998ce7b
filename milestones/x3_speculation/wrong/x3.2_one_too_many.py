"""Keeps two tokens behind the last right guess: the second was sampled after a wrong one."""


def accept(sampled, guesses):
    right = 0
    while right < len(guesses) and sampled[right] == guesses[right]:
        right += 1
    return list(sampled[: right + 2])
