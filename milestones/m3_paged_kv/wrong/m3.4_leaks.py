"""Counts the holders down and forgets the free list: after enough requests there is no block left, and nobody holds one."""


class BlockManager:
    def deallocate(self, seq):
        while seq.block_table:
            self.blocks[seq.block_table.pop()].ref_count -= 1
