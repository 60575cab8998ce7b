"""Collects all messages, then yields them: the buffer is right, a reader that fails loses the rest. Input: two messages, an error at the first."""

class Frames:
    def feed(self, data):
        self._buffer += data
        found = []
        while len(self._buffer) >= 4:
            (n,) = _LENGTH.unpack_from(self._buffer)
            if len(self._buffer) < 4 + n:
                break
            found.append(bytes(self._buffer[4 : 4 + n]))
            del self._buffer[: 4 + n]
        yield from found
