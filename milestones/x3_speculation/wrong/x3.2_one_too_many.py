"""Keeps two tokens behind the last right guess: the second was drawn after a wrong one."""


def accept(drawn, guesses):
    right = 0
    while right < len(guesses) and drawn[right] == guesses[right]:
        right += 1
    return list(drawn[: right + 2])
