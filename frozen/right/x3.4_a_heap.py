"""A heap of each sequence's next draft token, the one with the most worth first."""

def best_draft_lengths(hits, acceptances, cost, most, margin=1.0):
    import heapq

    num_seqs = len(hits)
    lengths, best = [0] * num_seqs, [0] * num_seqs
    tokens = width = float(num_seqs)
    rate = margin * num_seqs / cost.of_plain(num_seqs) if num_seqs else 0.0
    heap = [(-float(a), i) for i, a in enumerate(acceptances) if most > 0]
    heapq.heapify(heap)
    while heap:
        worth, i = heapq.heappop(heap)
        lengths[i] += 1
        tokens, width = tokens - worth * hits[i], width + hits[i]
        (seconds,) = cost.of_speculative(np.array([width]), np.array([max(lengths)]), hits)
        if tokens / seconds > rate:
            rate, best = tokens / seconds, list(lengths)
        if lengths[i] < most:
            heapq.heappush(heap, (worth * float(acceptances[i]), i))
    return best
