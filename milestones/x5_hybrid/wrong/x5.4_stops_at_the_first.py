"""Begins with the first snapshot it meets: the tokens up to a later one are computed again."""


class SnapshotCache:
    def longest_prefix(self, blocks):
        for count in range(1, len(blocks) + 1):
            snapshot = self._by_serial.get(blocks[count - 1].serial)
            if snapshot is not None:
                snapshot.last_used = self.clock
                return blocks[:count], snapshot
        return [], None
