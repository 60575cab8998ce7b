"""Waits while the text has a replacement character anywhere, not only at its end. Input: a byte that is no character, then "a"."""

class IncrementalDetokenizer:
    def advance(self):
        before = self._decode(self.token_ids[self._context : self._shown])
        after = self._decode(self.token_ids[self._context :])
        if self._shown == len(self.token_ids) or _REPLACEMENT in after:
            return ""
        new = after[len(before) :]
        self.text += new
        self._context, self._shown = self._shown, len(self.token_ids)
        return new
