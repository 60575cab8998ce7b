"""Right, and quadratic: the window never moves."""


class IncrementalDetokenizer:
    def advance(self):
        after = self._decode(self.token_ids)
        if len(after) <= len(self.text) or after.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._shown = len(self.token_ids)
        delta = after[len(self.text) :]
        self.text = after
        return delta
