"""Makes the list anew each time: blocks that were forgotten get their names back, though they may hold K/V of old weights."""


class PrefixCache:
    def cache_blocks(self, seq, blocks):
        serials = self.serials(seq)
        serials.clear()
        for i in range(len(blocks)):
            parent = serials[-1] if i else ROOT
            named = self._by_hash.get(self._hash(seq, i))
            if named is None or named.parent != parent:
                named = self._name(blocks[i], seq, i, parent)
            elif named.token_ids != self._tokens(seq, i):
                return
            serials.append(named.serial)
