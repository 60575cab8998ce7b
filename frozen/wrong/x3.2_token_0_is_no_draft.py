"""Takes draft token 0 for none. Input: sampled [0, 5], draft [0]."""

def accept(sampled, draft):
    accepted = []
    for token, drafted in zip(sampled, draft):
        accepted.append(token)
        if not drafted or token != drafted:
            return accepted
    return [*accepted, sampled[len(draft)]]
