"""Makes a new buffer of what is left, for each message: of a thousand that came at once, each is copied a thousand times."""


class Frames:
    def feed(self, data):
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[_LENGTH.size:end])
            self._buffer = self._buffer[end:]
            yield message
