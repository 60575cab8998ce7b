"""Stops at a block that another sequence holds too: those before it are still counted. Input: two sequences that share their first two blocks."""

class BlockManager:
    def deallocate(self, seq):
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count > 0:
                break
            self._free.append(block)
        seq.block_table.clear()
