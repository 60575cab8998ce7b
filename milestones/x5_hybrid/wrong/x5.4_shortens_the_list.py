"""Takes blocks off the list that it was given until the last one has a snapshot: the caller's list is shorter afterwards."""


class SnapshotCache:
    def longest_prefix(self, blocks):
        while blocks:
            snapshot = self._by_serial.get(blocks[-1].serial)
            if snapshot is not None:
                snapshot.last_used = self.clock
                return blocks, snapshot
            blocks.pop()
        return [], None
