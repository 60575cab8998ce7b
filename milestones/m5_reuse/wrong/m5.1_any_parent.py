"""Compares a block's own tokens and not what it followed: a collision one block earlier goes unnoticed."""


class PrefixCache:
    def longest_cached_prefix(self, seq):
        found = []
        for i in range((seq.num_tokens - 1) // self._block_size):
            block = self._by_hash.get(self._hash(seq, i))
            if block is None or block.token_ids != self._tokens(seq, i):
                break
            found.append(block)
        return found
