"""Where all scores are -inf the id is the largest int. Input: scores all -inf."""

def best_of_ranks(scores, ids):
    best = scores.max(0).values
    none = torch.full_like(ids, 2**31 - 1)
    return best, torch.where((scores == best) & (scores > -torch.inf), ids, none).min(0).values
