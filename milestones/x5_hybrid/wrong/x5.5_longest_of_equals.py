"""Of equally old ones it evicts the longest: the one snapshot of a prompt that serves who asks the same again."""


def snapshot_to_evict(snapshots):
    return min(snapshots, key=lambda snapshot: (snapshot.last_used, -snapshot.num_tokens))
