"""Begins at block 0 each time: serials that are there already are appended again, and no longer fit the table."""


class PrefixCache:
    def cache_blocks(self, seq, blocks):
        serials = self.serials(seq)
        parent = ROOT
        for i in range(len(blocks)):
            named = self._by_hash.get(self._hash(seq, i))
            if named is None or named.parent != parent:
                named = self._name(blocks[i], seq, i, parent)
            elif named.token_ids != self._tokens(seq, i):
                return
            parent = named.serial
            serials.append(parent)
