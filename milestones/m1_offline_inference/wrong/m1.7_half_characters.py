"""Shows replacement characters as soon as the first byte of a character arrives."""


class IncrementalDetokenizer:
    def advance(self):
        before = self._decode(self.token_ids[self._context : self._shown])
        after = self._decode(self.token_ids[self._context :])
        self._context, self._shown = self._shown, len(self.token_ids)
        delta = after[len(before) :]
        self.text += delta
        return delta
