"""Leaves a name to a block that nobody can reach any more: the prefix is never cached again until that block is taken."""


class PrefixCache:
    def cache_blocks(self, seq, blocks):
        serials = self.serials(seq)
        for i in range(len(serials), len(blocks)):
            parent = serials[-1] if i else ROOT
            named = self._by_hash.get(self._hash(seq, i))
            if named is None:
                named = self._name(blocks[i], seq, i, parent)
            elif named.parent != parent or named.token_ids != self._tokens(seq, i):
                return
            serials.append(named.serial)
