"""Always a block more, "so that the first token fits": a prompt of exactly one block holds two."""


class BlockManager:
    def allocate(self, seq, num_new_tokens):
        for _ in range((seq.num_computed_tokens + num_new_tokens) // self.block_size + 1 - len(seq.block_table)):
            seq.block_table.append(self._take())
