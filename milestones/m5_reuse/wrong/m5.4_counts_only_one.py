"""Sets the count of evictions to 1 in place of adding 1: after a busy day the metric still says one."""


class PrefixCache:
    def evict(self, block):
        if block.hash is not None:
            del self._by_hash[block.hash]
            block.hash, block.token_ids, block.serial, block.parent = None, b"", 0, 0
            self.stats.evictions = 1
