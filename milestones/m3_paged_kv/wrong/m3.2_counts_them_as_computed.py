"""Adds the new tokens to `num_computed_tokens`, which is the scheduler's to do: they count twice, and half the prompt is never computed."""


class BlockManager:
    def allocate(self, seq, num_new_tokens):
        for _ in range(self._num_missing(seq, num_new_tokens)):
            seq.block_table.append(self._take())
        seq.num_computed_tokens += num_new_tokens
