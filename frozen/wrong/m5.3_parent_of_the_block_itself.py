"""The parent is the serial of the sequence's own block before; a twin's own block has none. Input: two sequences with one first block, computed side by side, the second blocks differ."""

class PrefixCache:
    def cache_blocks(self, seq, blocks):
        serials = self.serials(seq)
        for i in range(len(serials), len(blocks)):
            parent = blocks[i - 1].serial if i else ROOT
            owner = self._by_hash.get(self._hash(seq, i))
            if owner is None or owner.parent != parent:
                owner = self._name(blocks[i], seq, i, parent)
            elif owner.token_ids != self._tokens(seq, i):
                return
            serials.append(owner.serial)
