"""Looks at the length first: every system prompt goes before any long conversation, however old that is."""


def snapshot_to_evict(snapshots):
    return min(snapshots, key=lambda snapshot: (snapshot.num_tokens, snapshot.last_used))
