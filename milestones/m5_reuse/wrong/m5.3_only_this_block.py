"""Leaves out the block that collides and goes on with the next one, which then has no parent to follow."""


class PrefixCache:
    def cache_blocks(self, seq, blocks):
        serials = self.serials(seq)
        for i in range(len(serials), len(blocks)):
            parent = serials[-1] if i else ROOT
            named = self._by_hash.get(self._hash(seq, i))
            if named is None or named.parent != parent:
                named = self._name(blocks[i], seq, i, parent)
            elif named.token_ids != self._tokens(seq, i):
                continue
            serials.append(named.serial)
