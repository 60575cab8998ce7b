"""Copies the whole slot. Behind a short message stands what is left of a longer one."""


class Ring:
    def read(self, reader, number=None):
        number = int(self._taken[reader]) if number is None else number
        if self._written[0] <= number:
            return None
        self._order()
        message = self._slots[number % SLOTS].copy()
        self._order()
        self._taken[reader] = number + 1
        return message
