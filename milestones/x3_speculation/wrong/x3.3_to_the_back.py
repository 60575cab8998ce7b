"""Puts the blocks to the back of the free list, where blocks live longest: useful ones are evicted before them."""


class BlockManager:
    def truncate(self, seq):
        needed = -(-seq.num_computed_tokens // self.block_size)
        while len(seq.block_table) > needed:
            block = self.blocks[seq.block_table.pop()]
            block.ref_count -= 1
            self._free.append(block)
