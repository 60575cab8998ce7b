"""Returns the slot itself, not a copy. The message changes under its reader's eyes as soon as the slot is used again."""


class Ring:
    def read(self, reader, number=None):
        number = int(self._taken[reader]) if number is None else number
        if self._written[0] <= number:
            return None
        self._order()
        message = self._slots[number % SLOTS, : self._lengths[number % SLOTS]]
        self._order()
        self._taken[reader] = number + 1
        return message
