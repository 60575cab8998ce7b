"""Appends what it copies to the text itself. Input: propose twice with a k beyond the end."""

class Lookup:
    def propose(self, k):
        n = len(self.tokens)
        for length in reversed(self._lengths):
            if length <= n and (at := self._after.get(tuple(self.tokens[-length:]))) is not None:
                while len(self.tokens) < at + k:
                    self.tokens.append(self.tokens[len(self.tokens) - n + at])
                return self.tokens[at : at + k]
        return []
