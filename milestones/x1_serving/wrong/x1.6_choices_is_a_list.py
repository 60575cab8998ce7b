"""Reads choices by index. Input: a set of choices."""

def choice_mask(vocabulary, choices, so_far, end_ids):
    found = set(end_ids) if so_far in choices else set()
    for i in range(len(choices)):
        choice = choices[i]
        if choice.startswith(so_far):
            for end in range(len(so_far) + 1, len(choice) + 1):
                found.update(vocabulary.get(choice[len(so_far) : end], ()))
    return sorted(found)
