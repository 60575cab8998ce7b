"""Emits without asking whether anybody listens: nobody takes the events away, and there are more with each step."""


class BlockManager:
    def truncate(self, seq):
        needed = -(-seq.num_computed_tokens // self.block_size)
        while len(seq.block_table) > needed:
            block = self.blocks[seq.block_table.pop()]
            block.ref_count -= 1
            prepend(self._free, block)
            self.events.emit(TableCut(seq.seq_id, block.block_id))
