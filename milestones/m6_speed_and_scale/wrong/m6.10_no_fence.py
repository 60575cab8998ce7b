"""The right order in Python, and no fence. x86 keeps stores in order, so it works there; other processors let the count overtake
the message."""


class Ring:
    def write(self, message):
        number = int(self._written[0])
        self._slots[number % SLOTS, : len(message)] = message
        self._lengths[number % SLOTS] = len(message)
        self._written[0] = number + 1
        return number
