"""First block first: the beginning of a sequence, which others are most likely to ask for again, is reused before its tail."""


class BlockManager:
    def deallocate(self, seq):
        for block_id in seq.block_table:
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)
        seq.block_table.clear()
