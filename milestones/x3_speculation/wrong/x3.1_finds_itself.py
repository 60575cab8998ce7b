"""Notes the run at the end of the text before anything follows it: each search finds the end itself, and nothing to copy."""


class Lookup:
    def extend(self, token_ids):
        for token in token_ids:
            self.tokens.append(token)
            end = len(self.tokens)
            for n in self._lengths:
                if n <= end:
                    self._after[tuple(self.tokens[end - n :])] = end

    def propose(self, k):
        end = len(self.tokens)
        for n in reversed(self._lengths):
            start = self._after.get(tuple(self.tokens[end - n :])) if n <= end else None
            if start is not None:
                return self.tokens[start : start + k]
        return []
