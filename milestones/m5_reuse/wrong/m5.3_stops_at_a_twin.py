"""Stops where somebody was first: of two equal prompts that go on differently, only one is ever found again."""


class PrefixCache:
    def cache_blocks(self, seq, blocks):
        serials = self.serials(seq)
        for i in range(len(serials), len(blocks)):
            parent = serials[-1] if i else ROOT
            named = self._by_hash.get(self._hash(seq, i))
            if named is not None and named.parent == parent:
                return
            serials.append(self._name(blocks[i], seq, i, parent).serial)
