"""Looks at the tokens and not at the table, so asking twice for the same token takes two blocks."""


class BlockManager:
    def may_append(self, seq, num_new_tokens):
        have = -(-seq.num_computed_tokens // self.block_size)
        need = -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
        for _ in range(need - have):
            seq.block_table.append(self._take())
