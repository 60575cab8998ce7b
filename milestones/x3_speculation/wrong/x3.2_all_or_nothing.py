"""Takes the whole draft if all of it is right, else none: the accepted tokens before the first wrong one are lost."""


def accept(sampled, draft):
    return list(sampled if list(sampled[: len(draft)]) == list(draft) else sampled[:1])
