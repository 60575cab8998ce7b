"""Chooses one number for all sequences: those whose draft tokens are never accepted take a part of the step's width."""


def best_draft_lengths(hits, acceptances, cost, most, margin=1.0):
    n = len(hits)
    best, best_speed = 0, margin * n / cost.of_plain(n)
    for k in range(1, most + 1):
        tokens = n + sum(h * a**j for h, a in zip(hits.tolist(), acceptances.tolist()) for j in range(1, k + 1))
        width = n + k * float(hits.sum())
        speed = tokens / float(cost.of_speculative(np.array([width]), np.array([k]), hits)[0])
        if speed > best_speed:
            best, best_speed = k, speed
    return [best] * n
