"""Reads the length with the highest byte first: 3 becomes 50 million, and nothing ever is whole."""


class Frames:
    def feed(self, data):
        self._buffer += data
        while len(self._buffer) >= 4:
            end = 4 + int.from_bytes(self._buffer[:4], "big")
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[4:end])
            del self._buffer[:end]
