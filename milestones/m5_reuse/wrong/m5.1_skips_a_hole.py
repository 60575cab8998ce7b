"""Goes on after a miss: the table then lacks a block in the middle, and all later blocks stand at the wrong positions."""


class PrefixCache:
    def longest_cached_prefix(self, seq):
        found = []
        for i in range((seq.num_tokens - 1) // self._block_size):
            block = self._by_hash.get(self._hash(seq, i))
            if block is not None and block.token_ids == self._tokens(seq, i):
                found.append(block)
        return found
