"""Keeps the first place of a run: what was written long ago, not what was written last."""


class Lookup:
    def extend(self, token_ids):
        for token in token_ids:
            end = len(self.tokens)
            for n in self._lengths:
                if n <= end:
                    self._after.setdefault(tuple(self.tokens[end - n :]), end)
            self.tokens.append(token)
