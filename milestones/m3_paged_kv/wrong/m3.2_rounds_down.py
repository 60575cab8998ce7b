"""Rounds down: the last tokens of a prompt that does not fill its last block have no place."""


class BlockManager:
    def allocate(self, seq, num_new_tokens):
        for _ in range((seq.num_computed_tokens + num_new_tokens) // self.block_size - len(seq.block_table)):
            seq.block_table.append(self._take())
