"""Of the equally old the first, whatever its tokens. Input: tokens 5 and 3, both used at 1."""

def snapshot_to_evict(snapshots):
    return min(snapshots, key=lambda s: s.last_used)
