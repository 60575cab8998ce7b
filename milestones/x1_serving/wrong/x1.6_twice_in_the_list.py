"""Lists a token once for each choice that it goes on with, in the order of the choices."""


def choice_mask(vocabulary, choices, so_far, end_ids):
    allowed = list(end_ids) if so_far in choices else []
    for choice in choices:
        if choice.startswith(so_far):
            rest = choice[len(so_far) :]
            for length in range(1, len(rest) + 1):
                allowed.extend(vocabulary.get(rest[:length], ()))
    return allowed
