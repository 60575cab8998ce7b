"""Cuts from the front: the last block comes to the very front of the free list, not the first."""


class BlockManager:
    def truncate(self, seq):
        needed = -(-seq.num_computed_tokens // self.block_size)
        for block_id in seq.block_table[needed:]:
            block = self.blocks[block_id]
            block.ref_count -= 1
            prepend(self._free, block)
        del seq.block_table[needed:]
