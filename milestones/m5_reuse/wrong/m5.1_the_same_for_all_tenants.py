"""Makes the hashes itself, from 0 on, and leaves out the salt: a tenant learns from the time to first token what others have asked."""


class PrefixCache:
    def longest_cached_prefix(self, seq):
        found, parent, prefix = [], ROOT, 0
        for i in range((seq.num_tokens - 1) // self._block_size):
            tokens = seq.token_ids[i * self._block_size : (i + 1) * self._block_size]
            prefix = compute_hash(tokens, prefix)
            block = self._by_hash.get(prefix)
            if block is None or block.parent != parent or block.token_ids != tokens.tobytes():
                break
            found.append(block)
            parent = block.serial
        return found
