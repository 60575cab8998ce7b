"""Takes all whole messages out of the buffer before it hands out the first: where its reader raises, those behind are lost."""


class Frames:
    def feed(self, data):
        self._buffer += data
        found = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if end > len(self._buffer):
                break
            found.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        yield from found
