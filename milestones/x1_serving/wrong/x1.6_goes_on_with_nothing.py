"""Lets a token without bytes come: the answer does not go on, and may never end."""


def choice_mask(vocabulary, choices, so_far, end_ids):
    allowed = set(end_ids) if so_far in choices else set()
    for choice in choices:
        if choice.startswith(so_far):
            rest = choice[len(so_far) :]
            for length in range(len(rest) + 1):
                allowed.update(vocabulary.get(rest[:length], ()))
    return sorted(allowed)
