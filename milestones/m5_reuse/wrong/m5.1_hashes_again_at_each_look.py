"""Right, and slow: a long prompt that waits for room is hashed from its beginning at every step."""


class PrefixCache:
    def longest_cached_prefix(self, seq):
        found, parent, prefix = [], ROOT, _salt_hash(seq.request.cache_salt)
        for i in range((seq.num_tokens - 1) // self._block_size):
            tokens = seq.token_ids[i * self._block_size : (i + 1) * self._block_size]
            prefix = compute_hash(tokens, prefix)
            block = self._by_hash.get(prefix)
            if block is None or block.parent != parent or block.token_ids != tokens.tobytes():
                break
            found.append(block)
            parent = block.serial
        return found
