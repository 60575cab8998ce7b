"""Leaves the reference count as it is: a free block that counts a holder, and is never freed again."""


class BlockManager:
    def truncate(self, seq):
        needed = -(-seq.num_computed_tokens // self.block_size)
        while len(seq.block_table) > needed:
            prepend(self._free, self.blocks[seq.block_table.pop()])
