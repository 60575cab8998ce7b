"""A set of ids, over all prefixes of what each choice has left."""

def choice_mask(vocabulary, choices, so_far, end_ids):
    allowed = set()
    for choice in choices:
        if choice == so_far:
            allowed |= set(end_ids)
        elif choice[: len(so_far)] == so_far:
            left = choice[len(so_far) :]
            for n in range(len(left)):
                allowed.update(vocabulary.get(left[: n + 1], ()))
    return sorted(allowed)
