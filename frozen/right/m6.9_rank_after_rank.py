"""Compares rank after rank with the best so far."""

def best_of_ranks(scores, ids):
    best, token = scores[0], ids[0]
    for score, id in zip(scores[1:], ids[1:]):
        better = (score > best) | ((score == best) & (id < token))
        best, token = torch.where(better, score, best), torch.where(better, id, token)
    return best, token
