"""Looks at the choices and not at what of them is still to come: after y it may begin again."""


def choice_mask(vocabulary, choices, so_far, end_ids):
    allowed = set(end_ids) if so_far in choices else set()
    for choice in choices:
        for length in range(1, len(choice) + 1):
            allowed.update(vocabulary.get(choice[:length], ()))
    return sorted(allowed)
