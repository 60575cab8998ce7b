"""After a twin it gives its own nameless block as the parent, serial 0: what follows can never be reached."""


class PrefixCache:
    def cache_blocks(self, seq, blocks):
        serials = self.serials(seq)
        for i in range(len(serials), len(blocks)):
            parent = serials[-1] if i else ROOT
            named = self._by_hash.get(self._hash(seq, i))
            if named is None or named.parent != parent:
                self._name(blocks[i], seq, i, parent)
            elif named.token_ids != self._tokens(seq, i):
                return
            serials.append(blocks[i].serial)
