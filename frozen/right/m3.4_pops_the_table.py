"""Pops from the table itself."""

class BlockManager:
    def deallocate(self, seq):
        while seq.block_table:
            block = self.blocks[seq.block_table.pop()]
            block.ref_count -= 1
            if not block.ref_count:
                self._free.append(block)
