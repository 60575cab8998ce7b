"""Keeps right guesses alone, and forgets the bonus token: a step in which none is right yields nothing, for ever."""


def accept(sampled, guesses):
    right = 0
    while right < len(guesses) and sampled[right] == guesses[right]:
        right += 1
    return list(sampled[:right])
