"""Names its page whoever has the name: the twin that others already hold is forgotten, and what follows it cut off."""


class PrefixCache:
    def publish(self, seq, blocks):
        for i in range(len(seq.page_serials), len(blocks)):
            parent = seq.page_serials[-1] if i else ROOT
            seq.page_serials.append(self._name(blocks[i], seq, i, parent).serial)
