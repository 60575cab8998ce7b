"""Leaves at least one block in the table. Input: no computed token, two reserved blocks."""

class BlockManager:
    def truncate(self, seq):
        keep = max(1, -(-seq.num_computed_tokens // self.block_size))
        while len(seq.block_table) > keep:
            block = self.blocks[seq.block_table.pop()]
            block.ref_count = 0
            prepend(self._free, block)
            if self.events.on:
                self.events.emit(TableCut(seq.seq_id, block.block_id))
