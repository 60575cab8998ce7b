"""Allows no end. When the answer is complete nothing is allowed, and every score is minus infinity."""


def choice_mask(vocabulary, choices, so_far, end_ids):
    allowed = set()
    for choice in choices:
        if choice.startswith(so_far):
            rest = choice[len(so_far) :]
            for length in range(1, len(rest) + 1):
                allowed.update(vocabulary.get(rest[:length], ()))
    return sorted(allowed)
