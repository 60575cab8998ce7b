"""Names its block whoever has the name: the twin that others already hold is forgotten, and what follows it cut off."""


class PrefixCache:
    def cache_blocks(self, seq, blocks):
        serials = self.serials(seq)
        for i in range(len(serials), len(blocks)):
            parent = serials[-1] if i else ROOT
            serials.append(self._name(blocks[i], seq, i, parent).serial)
