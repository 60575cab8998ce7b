"""Takes a stranger with the same hash for a twin: its own next pages are then published as if they followed the stranger's."""


class PrefixCache:
    def publish(self, seq, blocks):
        for i in range(len(seq.page_serials), len(blocks)):
            parent = seq.page_serials[-1] if i else ROOT
            named = self._by_hash.get(self._hash(seq, i))
            if named is None or named.parent != parent:
                named = self._name(blocks[i], seq, i, parent)
            seq.page_serials.append(named.serial)
