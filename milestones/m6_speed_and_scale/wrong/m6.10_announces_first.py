"""Counts the message before it is there. A reader that looks in between copies what the slot held before: half a step,
or one of four steps ago. On an idle machine that never happens."""


class Ring:
    def write(self, message):
        number = int(self._written[0])
        self._written[0] = number + 1
        self._order()
        self._slots[number % SLOTS, : len(message)] = message
        self._lengths[number % SLOTS] = len(message)
        return number
