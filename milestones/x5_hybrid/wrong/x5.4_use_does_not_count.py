"""Does not note the use: a system prompt that every request begins with is evicted as soon as newer snapshots come."""


class SnapshotCache:
    def longest_prefix(self, blocks):
        for count in range(len(blocks), 0, -1):
            snapshot = self._by_serial.get(blocks[count - 1].serial)
            if snapshot is not None:
                return blocks[:count], snapshot
        return [], None
