"""Allows only the token that is all of the rest. A choice that no single token spells can never be answered."""


def choice_mask(vocabulary, choices, so_far, end_ids):
    allowed = set(end_ids) if so_far in choices else set()
    for choice in choices:
        if choice.startswith(so_far):
            allowed.update(vocabulary.get(choice[len(so_far) :], ()))
    return sorted(allowed)
