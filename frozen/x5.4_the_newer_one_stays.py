"""Where a block has a snapshot already, the new one takes its place and the old slot is freed. Input: two for one serial."""

class SnapshotCache:
    def cache_snapshot(self, slot, num_tokens, serial):
        self.evict(serial)
        self._by_serial[serial] = Snapshot(slot, num_tokens, self.clock, serial)
