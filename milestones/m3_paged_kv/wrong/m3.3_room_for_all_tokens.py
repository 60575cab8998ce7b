"""Takes blocks for all tokens that the sequence has, also for those of later steps: others could have used them."""


class BlockManager:
    def may_append(self, seq, num_new_tokens):
        end = max(seq.num_tokens, seq.num_computed_tokens + num_new_tokens)
        while len(seq.block_table) * self.block_size < end:
            seq.block_table.append(self._take())
