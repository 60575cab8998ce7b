"""Decodes the new tokens alone: the space between two words is lost."""


class IncrementalDetokenizer:
    def advance(self):
        delta = self._decode(self.token_ids[self._shown :])
        if not delta or delta.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context = self._shown = len(self.token_ids)
        self.text += delta
        return delta
