"""Takes the block from the free list by hand and counts no holder: the reference count stays 0."""


class BlockManager:
    def allocate(self, seq, num_new_tokens):
        for _ in range(self._num_missing(seq, num_new_tokens)):
            seq.block_table.append(self._free.popleft().block_id)
