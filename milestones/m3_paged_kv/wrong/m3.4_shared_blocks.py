"""Frees every block, whoever else holds it: two sequences end up writing into one block."""


class BlockManager:
    def deallocate(self, seq):
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count = 0
            self._free.append(block)
        seq.block_table.clear()
