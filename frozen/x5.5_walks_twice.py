"""Walks the snapshots twice. Input: a generator."""

def snapshot_to_evict(snapshots):
    oldest = min(s.last_used for s in snapshots)
    return min((s for s in snapshots if s.last_used == oldest), key=lambda s: s.num_tokens)
