"""Replaces the table instead of extending it: blocks the sequence held already are lost to everybody."""


class BlockManager:
    def allocate(self, seq, num_new_tokens):
        count = -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
        seq.block_table = [self._take() for _ in range(count)]
