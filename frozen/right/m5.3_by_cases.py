"""A `while` over the serials, the cases apart."""

class PrefixCache:
    def cache_blocks(self, seq, blocks):
        serials = self.serials(seq)
        while len(serials) < len(blocks):
            i = len(serials)
            parent = serials[-1] if serials else ROOT
            owner = self._by_hash.get(self._hash(seq, i))
            if owner is not None and owner.parent == parent:
                if owner.token_ids != self._tokens(seq, i):
                    break
                serials.append(owner.serial)
            else:
                serials.append(self._name(blocks[i], seq, i, parent).serial)
