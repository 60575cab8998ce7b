"""Sets `num_computed_tokens` to 0 as well, which is for `requeue` to do: an answer that is over seems never to have been computed."""


class BlockManager:
    def deallocate(self, seq):
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)
        seq.block_table.clear()
        seq.num_computed_tokens = 0
