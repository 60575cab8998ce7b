"""Believes a 64-bit hash: right for years, and one day a user reads an answer to somebody else's text."""


class PrefixCache:
    def longest_cached_prefix(self, seq):
        found = []
        for i in range((seq.num_tokens - 1) // self._block_size):
            block = self._by_hash.get(self._hash(seq, i))
            if block is None:
                break
            found.append(block)
        return found
