"""Right, and slow: it tries each of 150,000 tokens at each step of each answer, and everybody waits."""


def choice_mask(vocabulary, choices, so_far, end_ids):
    allowed = set(end_ids) if so_far in choices else set()
    for token, ids in vocabulary.items():
        if token and any(c.startswith(so_far + token) for c in choices):
            allowed.update(ids)
    return sorted(allowed)
