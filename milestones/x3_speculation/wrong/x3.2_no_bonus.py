"""Keeps accepted draft tokens alone, and forgets the bonus token: a step in which none is accepted yields nothing, for ever."""


def accept(sampled, draft):
    num_accepted = 0
    while num_accepted < len(draft) and sampled[num_accepted] == draft[num_accepted]:
        num_accepted += 1
    return list(sampled[:num_accepted])
