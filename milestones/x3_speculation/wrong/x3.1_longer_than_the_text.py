"""Does not ask whether the text is as long as the run: a slice that begins before the text is another, shorter run."""


class Lookup:
    def propose(self, k):
        end = len(self.tokens)
        for n in reversed(self._lengths):
            start = self._after.get(tuple(self.tokens[end - n :]))
            if start is not None:
                return [self.tokens[start + i % (end - start)] for i in range(k)]
        return []
