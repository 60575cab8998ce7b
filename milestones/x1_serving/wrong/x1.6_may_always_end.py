"""Allows the end at any moment: half a word is an answer."""


def choice_mask(vocabulary, choices, so_far, end_ids):
    allowed = set(end_ids)
    for choice in choices:
        if choice.startswith(so_far):
            rest = choice[len(so_far) :]
            for length in range(1, len(rest) + 1):
                allowed.update(vocabulary.get(rest[:length], ()))
    return sorted(allowed)
