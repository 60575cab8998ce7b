"""Keeps the blocks behind the snapshot too: attention has their K/V, and the state misses their tokens. The text is wrong, and nothing says so."""


class SnapshotCache:
    def longest_prefix(self, blocks):
        for block in reversed(blocks):
            snapshot = self._by_serial.get(block.serial)
            if snapshot is not None:
                snapshot.last_used = self.clock
                return blocks, snapshot
        return [], None
