"""Counts the blocks that the new tokens fill by themselves: what is left of the last block stays empty, and the table is too long."""


class BlockManager:
    def allocate(self, seq, num_new_tokens):
        for _ in range(-(-num_new_tokens // self.block_size)):
            seq.block_table.append(self._take())
