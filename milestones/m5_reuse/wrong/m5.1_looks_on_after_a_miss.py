"""Looks on after a miss, with the parent that it had: where hashes collide, the first block of another prompt gets into the middle."""


class PrefixCache:
    def longest_cached_prefix(self, seq):
        found = []
        parent = ROOT
        for i in range((seq.num_tokens - 1) // self._block_size):
            block = self._by_hash.get(self._hash(seq, i))
            if block is None or block.parent != parent or block.token_ids != self._tokens(seq, i):
                continue
            found.append(block)
            parent = block.serial
        return found
