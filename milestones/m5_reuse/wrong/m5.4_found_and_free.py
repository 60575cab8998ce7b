"""A block that was found stays in the free list: it is handed out and overwritten while somebody reads it."""


class PrefixCachingBlockManager:
    def adopt(self, block):
        block.ref_count += 1
