"""Copies with the remainder by the period."""

class Lookup:
    def propose(self, k):
        for length in sorted(self._lengths, reverse=True):
            run = tuple(self.tokens[len(self.tokens) - length :]) if length <= len(self.tokens) else None
            if run in self._after:
                at = self._after[run]
                period = len(self.tokens) - at
                return [self.tokens[at + i % period] for i in range(k)]
        return []
