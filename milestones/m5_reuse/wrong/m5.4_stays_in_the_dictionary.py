"""Wipes the block and leaves the dictionary as it is: the old name leads to a block that holds something else by now."""


class PrefixCache:
    def evict(self, block):
        if block.hash is not None:
            block.hash, block.token_ids, block.serial, block.parent = None, b"", 0, 0
            self.stats.evictions += 1
