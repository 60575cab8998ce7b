"""Cuts the list of sampled tokens itself: whoever gave it reads the rest later, or not any more."""


def accept(sampled, draft):
    num_accepted = 0
    while num_accepted < len(draft) and sampled[num_accepted] == draft[num_accepted]:
        num_accepted += 1
    del sampled[num_accepted + 1 :]
    return sampled
