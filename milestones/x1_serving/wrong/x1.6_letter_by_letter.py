"""Allows tokens of one byte only. The model learned to say yes in one token, and is now made to spell it."""


def choice_mask(vocabulary, choices, so_far, end_ids):
    allowed = set(end_ids) if so_far in choices else set()
    for choice in choices:
        if choice.startswith(so_far):
            allowed.update(vocabulary.get(choice[len(so_far) : len(so_far) + 1], ()))
    return sorted(allowed)
