"""Strikes the name off the dictionary, not off the block: evicted a second time, it takes away the name of its successor."""


class PrefixCache:
    def evict(self, block):
        if self._by_hash.pop(block.hash, None) is not None:
            self.stats.evictions += 1
