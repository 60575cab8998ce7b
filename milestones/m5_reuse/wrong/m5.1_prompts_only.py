"""Looks at the prompt alone: a preempted sequence computes its whole answer again, though the blocks are still there."""


class PrefixCache:
    def longest_cached_prefix(self, seq):
        found = []
        parent = ROOT
        for i in range((seq.num_prompt_tokens - 1) // self._block_size):
            block = self._by_hash.get(self._hash(seq, i))
            if block is None or block.parent != parent or block.token_ids != self._tokens(seq, i):
                break
            found.append(block)
            parent = block.serial
        return found
