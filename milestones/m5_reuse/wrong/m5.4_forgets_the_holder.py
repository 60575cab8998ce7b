"""Sets the number of holders to 0 as well: the block was just taken for somebody, and is now free for the next one, too."""


class PrefixCache:
    def evict(self, block):
        if block.hash is not None:
            del self._by_hash[block.hash]
            block.hash, block.token_ids, block.serial, block.parent, block.ref_count = None, b"", 0, 0, 0
            self.stats.evictions += 1
