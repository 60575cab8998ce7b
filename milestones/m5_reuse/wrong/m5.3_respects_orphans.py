"""Leaves a name to a page that nobody can reach any more: the prefix is never cached again until that page is taken."""


class PrefixCache:
    def publish(self, seq, blocks):
        for i in range(len(seq.page_serials), len(blocks)):
            parent = seq.page_serials[-1] if i else ROOT
            named = self._by_hash.get(self._hash(seq, i))
            if named is None:
                named = self._name(blocks[i], seq, i, parent)
            elif named.parent != parent or named.token_ids != self._tokens(seq, i):
                return
            seq.page_serials.append(named.serial)
