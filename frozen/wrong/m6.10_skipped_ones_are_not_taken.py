"""Counts one message as taken even if a later one was asked for by its number. Input: three messages written, the reader reads number 2 at once."""

class Ring:
    def read(self, reader, number=None):
        at = int(self._taken[reader]) if number is None else number
        if int(self._written[0]) <= at:
            return None
        self._order()
        slot = at % SLOTS
        message = self._slots[slot, : int(self._lengths[slot])].copy()
        self._order()
        self._taken[reader] += 1
        return message
