"""Counts a second snapshot of a block as a use of the first: no sequence has begun with it."""


class SnapshotCache:
    def cache_snapshot(self, slot, num_tokens, serial):
        if serial in self._by_serial:
            self._by_serial[serial].last_used = self.clock
            self.free(slot)
        else:
            self._by_serial[serial] = Snapshot(slot, num_tokens, self.clock, serial)
