"""Copies no further than the text goes: where it has just begun to repeat itself, it drafts a token or two."""


class Lookup:
    def propose(self, k):
        end = len(self.tokens)
        for n in reversed(self._lengths):
            start = self._after.get(tuple(self.tokens[end - n :])) if n <= end else None
            if start is not None:
                return self.tokens[start : start + k]
        return []
