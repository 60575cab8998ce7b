"""Looks for the most tokens a step, not for the most a second: always as many draft tokens as are allowed."""


def best_draft_lengths(hits, acceptances, cost, most, margin=1.0):
    return [most if a > 0 else 0 for a in acceptances.tolist()]
