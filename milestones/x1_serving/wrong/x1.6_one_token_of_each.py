"""Takes one token for each text. Two tokens may have the same bytes, and the model may want the other one."""


def choice_mask(vocabulary, choices, so_far, end_ids):
    allowed = set(end_ids) if so_far in choices else set()
    for choice in choices:
        if choice.startswith(so_far):
            rest = choice[len(so_far) :]
            for length in range(1, len(rest) + 1):
                allowed.update(vocabulary.get(rest[:length], ())[:1])
    return sorted(allowed)
