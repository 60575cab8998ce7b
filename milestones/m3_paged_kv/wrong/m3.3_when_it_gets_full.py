"""Takes the next block as soon as the last slot of a block is used, one step early: a sequence that ends there held a block for nothing."""


class BlockManager:
    def may_append(self, seq, num_new_tokens):
        if (seq.num_computed_tokens + num_new_tokens) % self.block_size == 0:
            seq.block_table.append(self._take())
