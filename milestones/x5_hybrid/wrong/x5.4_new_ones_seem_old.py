"""Notes no time for a new snapshot: it seems unused since the beginning, and is the next one to be evicted."""


class SnapshotCache:
    def cache_snapshot(self, slot, num_tokens, serial):
        if serial in self._by_serial:
            self.free(slot)
        else:
            self._by_serial[serial] = Snapshot(slot, num_tokens, 0, serial)
