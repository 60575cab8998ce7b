"""Messages are bytearrays. Input: any."""

class Frames:
    def feed(self, data):
        self._buffer += data
        while len(self._buffer) >= 4:
            (n,) = _LENGTH.unpack_from(self._buffer)
            if len(self._buffer) < 4 + n:
                return
            message = self._buffer[4 : 4 + n]
            del self._buffer[: 4 + n]
            yield message
