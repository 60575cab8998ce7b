"""No prefix where the first block has no snapshot. Input: a snapshot at the second block alone."""

class SnapshotCache:
    def longest_prefix(self, blocks):
        if not blocks or blocks[0].serial not in self._by_serial:
            return [], None
        for n in range(len(blocks), 0, -1):
            if found := self._by_serial.get(blocks[n - 1].serial):
                self.clock += 1
                found.last_used = self.clock
                return blocks[:n], found
        return [], None
