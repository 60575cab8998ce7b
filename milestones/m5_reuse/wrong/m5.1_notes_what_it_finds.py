"""Notes the serials of a hit, which `get_computed_blocks` does as well: the list is twice as long as the table, and what follows is never published."""


class PrefixCache:
    def longest_cached_prefix(self, seq):
        found, parent = [], ROOT
        for i in range((seq.num_tokens - 1) // self._block_size):
            block = self._by_hash.get(self._hash(seq, i))
            if block is None or block.parent != parent or block.token_ids != self._tokens(seq, i):
                break
            found.append(block)
            self.serials(seq).append(block.serial)
            parent = block.serial
        return found
