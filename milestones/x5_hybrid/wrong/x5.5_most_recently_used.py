"""Evicts what was used last: a conversation that goes on finds nothing, and old ones stay for ever."""


def snapshot_to_evict(snapshots):
    return max(snapshots, key=lambda snapshot: (snapshot.last_used, snapshot.num_tokens))
