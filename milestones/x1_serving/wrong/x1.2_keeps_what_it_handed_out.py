"""Does not take what it hands out from the buffer: it comes again with the next piece."""


class Frames:
    def feed(self, data):
        self._buffer += data
        start = 0
        while start + 4 <= len(self._buffer):
            end = start + 4 + int.from_bytes(self._buffer[start : start + 4], "little")
            if end > len(self._buffer):
                break
            yield bytes(self._buffer[start + 4 : end])
            start = end
