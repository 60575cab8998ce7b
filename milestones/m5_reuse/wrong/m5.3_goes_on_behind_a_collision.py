"""Goes on where it should return: what follows a collision gets the name of a block that follows what came before it, and is served to a prompt without the block between."""


class PrefixCache:
    def cache_blocks(self, seq, blocks):
        serials = self.serials(seq)
        for i in range(len(serials), len(blocks)):
            parent = serials[-1] if serials else ROOT
            named = self._by_hash.get(self._hash(seq, i))
            if named is None or named.parent != parent:
                named = self._name(blocks[i], seq, i, parent)
            elif named.token_ids != self._tokens(seq, i):
                continue
            serials.append(named.serial)
