"""Reads a length as soon as one byte of it is there. Torn within its four bytes, it is another number."""


class Frames:
    def feed(self, data):
        self._buffer += data
        while self._buffer:
            end = 4 + int.from_bytes(self._buffer[:4], "little")
            if len(self._buffer) < end - 4:
                break
            yield bytes(self._buffer[4:end])
            del self._buffer[:end]
