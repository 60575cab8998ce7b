"""Leaves the table as it is: the sequence goes on naming blocks that others get, and frees them again the next time."""


class BlockManager:
    def deallocate(self, seq):
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)
