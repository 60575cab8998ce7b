"""Looks at the tokens first: a stranger after another block keeps the name although nothing follows it any more, and the prefix stays unfound."""


class PrefixCache:
    def cache_blocks(self, seq, blocks):
        serials = self.serials(seq)
        for i in range(len(serials), len(blocks)):
            parent = serials[-1] if i else ROOT
            named = self._by_hash.get(self._hash(seq, i))
            if named is not None and named.token_ids != self._tokens(seq, i):
                return
            if named is None or named.parent != parent:
                named = self._name(blocks[i], seq, i, parent)
            serials.append(named.serial)
