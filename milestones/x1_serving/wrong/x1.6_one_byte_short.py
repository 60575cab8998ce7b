"""Stops one byte before the end of a choice: the token that completes it is never allowed."""


def choice_mask(vocabulary, choices, so_far, end_ids):
    allowed = set(end_ids) if so_far in choices else set()
    for choice in choices:
        if choice.startswith(so_far):
            rest = choice[len(so_far) :]
            for length in range(1, len(rest)):
                allowed.update(vocabulary.get(rest[:length], ()))
    return sorted(allowed)
