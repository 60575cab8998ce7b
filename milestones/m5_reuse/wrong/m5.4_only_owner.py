"""Sets the count to 1: when the first of two holders leaves, the block is free under the second."""


class PrefixCachingBlockManager:
    def adopt(self, block):
        if block.ref_count == 0:
            self._free.remove(block)
        block.ref_count = 1
