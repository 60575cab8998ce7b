"""Puts the ends behind the others: the list is ascending only where their ids are the highest, and an id may come twice."""


def choice_mask(vocabulary, choices, so_far, end_ids):
    allowed = set()
    for choice in choices:
        if choice.startswith(so_far):
            rest = choice[len(so_far) :]
            for length in range(1, len(rest) + 1):
                allowed.update(vocabulary.get(rest[:length], ()))
    return sorted(allowed) + (sorted(end_ids) if so_far in choices else [])
