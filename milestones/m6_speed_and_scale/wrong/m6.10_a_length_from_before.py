"""Takes the length before it looks at the count: it may be that of the message four before, and the new one is cut or too long."""


class Ring:
    def read(self, reader, number=None):
        number = int(self._taken[reader]) if number is None else number
        length = self._lengths[number % SLOTS]
        if self._written[0] <= number:
            return None
        self._order()
        message = self._slots[number % SLOTS, : length].copy()
        self._order()
        self._taken[reader] = number + 1
        return message
