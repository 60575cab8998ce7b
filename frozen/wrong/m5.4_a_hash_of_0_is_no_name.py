"""Takes a hash of 0 for no name. Input: a block whose hash is 0."""

class PrefixCache:
    def evict(self, block):
        if not block.hash:
            return
        del self._by_hash[block.hash]
        block.hash, block.token_ids, block.serial, block.parent = None, b"", 0, 0
        self.stats.evictions += 1
