"""A token that completes a choice may not come if a longer choice goes on. Input: yes, yesterday."""

def choice_mask(vocabulary, choices, so_far, end_ids):
    found = set(end_ids) if so_far in choices else set()
    for choice in choices:
        if choice.startswith(so_far):
            for end in range(len(so_far) + 1, len(choice) + 1):
                whole = choice[:end]
                if whole in choices and any(c != whole and c.startswith(whole) for c in choices):
                    continue
                found.update(vocabulary.get(choice[len(so_far) : end], ()))
    return sorted(found)
