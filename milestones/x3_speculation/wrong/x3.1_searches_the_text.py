"""Looks through the text for each draft, as if nothing had been noted: right, and slower with each token."""


class Lookup:
    def propose(self, k):
        text = self.tokens
        end = len(text)
        for n in reversed(self._lengths):
            if n > end:
                continue
            for start in range(end - n - 1, -1, -1):
                if text[start : start + n] == text[end - n :]:
                    return [text[start + n + i % (end - start - n)] for i in range(k)]
        return []
