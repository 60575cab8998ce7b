"""Notes runs of the greatest length alone: a shorter run is never found."""


class Lookup:
    def extend(self, token_ids):
        for token in token_ids:
            end = len(self.tokens)
            n = self._lengths[-1]
            if n <= end:
                self._after[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)
