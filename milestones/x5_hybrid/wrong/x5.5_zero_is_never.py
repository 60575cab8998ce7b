"""Takes 0 for never, and keeps what was used last at 0. Input: used last at 0 and at 4."""


def snapshot_to_evict(snapshots):
    found = list(snapshots)
    return min([s for s in found if s.last_used] or found, key=lambda s: (s.last_used, s.num_tokens))
