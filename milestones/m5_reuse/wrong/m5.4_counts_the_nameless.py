"""Counts blocks that held nothing worth finding: the statistics cry wolf from the first request on."""


class PrefixCache:
    def evict(self, block):
        self._by_hash.pop(block.hash, None)
        block.hash, block.token_ids, block.serial, block.parent = None, b"", 0, 0
        self.stats.evictions += 1
