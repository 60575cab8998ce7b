"""Counts full blocks alone: a block that is filled in part goes, and tokens that were computed with it."""


class BlockManager:
    def truncate(self, seq):
        needed = seq.num_computed_tokens // self.block_size
        while len(seq.block_table) > needed:
            block = self.blocks[seq.block_table.pop()]
            block.ref_count -= 1
            prepend(self._free, block)
