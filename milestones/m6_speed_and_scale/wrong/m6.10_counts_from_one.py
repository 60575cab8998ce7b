"""Puts message n into slot n + 1. Writer and readers no longer speak of the same slot."""


class Ring:
    def write(self, message):
        number = int(self._written[0])
        self._slots[(number + 1) % SLOTS, : len(message)] = message
        self._lengths[(number + 1) % SLOTS] = len(message)
        self._order()
        self._written[0] = number + 1
        return number
