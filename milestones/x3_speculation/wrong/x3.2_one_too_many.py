"""Keeps two tokens behind the last accepted one: the second was sampled after a wrong one."""


def accept(sampled, draft):
    num_accepted = 0
    while num_accepted < len(draft) and sampled[num_accepted] == draft[num_accepted]:
        num_accepted += 1
    return list(sampled[: num_accepted + 2])
