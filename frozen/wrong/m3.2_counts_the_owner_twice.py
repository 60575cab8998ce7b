"""Counts an owner that `_take` has counted. Input: any; the block is not free after the sequence has gone."""

class BlockManager:
    def allocate(self, seq, num_new_tokens):
        needed = (seq.num_computed_tokens + num_new_tokens + self.block_size - 1) // self.block_size
        while len(seq.block_table) < needed:
            block_id = self._take()
            self.blocks[block_id].ref_count += 1
            seq.block_table.append(block_id)
