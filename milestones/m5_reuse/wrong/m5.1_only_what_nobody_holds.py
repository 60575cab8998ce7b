"""Takes a block that somebody holds for a miss: a prompt that all clients share is computed for each of them while they run at the same time."""


class PrefixCache:
    def longest_cached_prefix(self, seq):
        found, parent = [], ROOT
        for i in range((seq.num_tokens - 1) // self._block_size):
            block = self._by_hash.get(self._hash(seq, i))
            if block is None or block.ref_count > 0 or block.parent != parent or block.token_ids != self._tokens(seq, i):
                break
            found.append(block)
            parent = block.serial
        return found
