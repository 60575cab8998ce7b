"""The rule for a single token, `% block_size == 1`: wrong for several at once, and for blocks of one token."""


class BlockManager:
    def may_append(self, seq, num_new_tokens):
        if (seq.num_computed_tokens + num_new_tokens) % self.block_size == 1:
            seq.block_table.append(self._take())
