"""Says that it has taken the message before it copies it. The writer may then write over what is being copied."""


class Ring:
    def read(self, reader, number=None):
        number = int(self._taken[reader]) if number is None else number
        if self._written[0] <= number:
            return None
        self._order()
        self._taken[reader] = number + 1
        self._order()
        return self._slots[number % SLOTS, : self._lengths[number % SLOTS]].copy()
