"""Takes a stranger with the same hash for a twin: its own next blocks are then published as if they followed the stranger's."""


class PrefixCache:
    def cache_blocks(self, seq, blocks):
        serials = self.serials(seq)
        for i in range(len(serials), len(blocks)):
            parent = serials[-1] if i else ROOT
            named = self._by_hash.get(self._hash(seq, i))
            if named is None or named.parent != parent:
                named = self._name(blocks[i], seq, i, parent)
            serials.append(named.serial)
