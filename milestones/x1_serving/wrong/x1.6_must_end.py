"""Ends as soon as one choice is complete: a longer one that begins with it can never be chosen."""


def choice_mask(vocabulary, choices, so_far, end_ids):
    if so_far in choices:
        return sorted(end_ids)
    allowed = set()
    for choice in choices:
        if choice.startswith(so_far):
            rest = choice[len(so_far) :]
            for length in range(1, len(rest) + 1):
                allowed.update(vocabulary.get(rest[:length], ()))
    return sorted(allowed)
