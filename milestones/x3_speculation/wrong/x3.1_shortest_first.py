"""Asks for the shortest run first: two equal tokens are found nearly everywhere, and what followed them says little."""


class Lookup:
    def propose(self, k):
        end = len(self.tokens)
        for n in self._lengths:
            start = self._after.get(tuple(self.tokens[end - n :])) if n <= end else None
            if start is not None:
                return [self.tokens[start + i % (end - start)] for i in range(k)]
        return []
