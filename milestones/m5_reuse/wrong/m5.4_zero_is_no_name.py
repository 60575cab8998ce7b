"""Asks whether the hash is true, and 0 is not: of 2 ** 64 names one is never forgotten, and that block is served with what somebody else wrote into it."""


class PrefixCache:
    def evict(self, block):
        if block.hash:
            del self._by_hash[block.hash]
            block.hash, block.token_ids, block.serial, block.parent = None, b"", 0, 0
            self.stats.evictions += 1
