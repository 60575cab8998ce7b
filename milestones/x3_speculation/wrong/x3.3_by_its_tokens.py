"""Keeps room for all tokens of the text: the newest was sampled and is not computed, and a block may stay for it that holds draft tokens alone."""


class BlockManager:
    def truncate(self, seq):
        needed = -(-seq.num_tokens // self.block_size)
        while len(seq.block_table) > needed:
            block = self.blocks[seq.block_table.pop()]
            block.ref_count -= 1
            prepend(self._free, block)
