"""A snapshot that was never used (0) is kept. Input: last used 0 and 4."""

def snapshot_to_evict(snapshots):
    found = list(snapshots)
    return min([s for s in found if s.last_used] or found, key=lambda s: (s.last_used, s.num_tokens))
