"""Finds a prompt to its last token: nothing is left to compute, and no logits give the next token."""


class PrefixCache:
    def longest_cached_prefix(self, seq):
        found, parent = [], ROOT
        for i in range(seq.num_tokens // self._block_size):
            block = self._by_hash.get(self._hash(seq, i))
            if block is None or block.parent != parent or block.token_ids != self._tokens(seq, i):
                break
            found.append(block)
            parent = block.serial
        return found
