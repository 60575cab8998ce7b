"""Puts the new snapshot in the place of the old one: the old slot belongs to nobody any more, and the pool shrinks."""

from folovllm.electives.hybrid.snapshots import Snapshot


class SnapshotCache:
    def cache_snapshot(self, slot, num_tokens, serial):
        self._by_serial[serial] = Snapshot(slot, num_tokens, self.clock, serial)
