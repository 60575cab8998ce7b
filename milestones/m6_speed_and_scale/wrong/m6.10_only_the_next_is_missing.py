"""Looks whether the count is the number, and not whether it has reached it: a message that comes after the next one is read before it was written."""


class Ring:
    def read(self, reader, number=None):
        number = int(self._taken[reader]) if number is None else number
        if self._written[0] == number:
            return None
        self._order()
        message = self._slots[number % SLOTS, : self._lengths[number % SLOTS]].copy()
        self._order()
        self._taken[reader] = number + 1
        return message
