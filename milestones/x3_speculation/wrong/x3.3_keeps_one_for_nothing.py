"""Keeps one block in any case: where no token is computed it holds a block for nothing."""


class BlockManager:
    def truncate(self, seq):
        needed = max(1, -(-seq.num_computed_tokens // self.block_size))
        while len(seq.block_table) > needed:
            block = self.blocks[seq.block_table.pop()]
            block.ref_count -= 1
            prepend(self._free, block)
            if self.events.on:
                self.events.emit(TableCut(seq.seq_id, block.block_id))
