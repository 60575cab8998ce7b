"""The parent of a first block is not looked at. Input: a block of the first one's hash and tokens that was published behind another."""

class PrefixCache:
    def longest_cached_prefix(self, seq):
        found = []
        for i in range((seq.num_tokens - 1) // self._block_size):
            block = self._by_hash.get(self._hash(seq, i))
            if block is None or block.token_ids != self._tokens(seq, i):
                break
            if found and block.parent != found[-1].serial:
                break
            found.append(block)
        return found
