"""Reads the length by itself, and slices before it deletes."""

class Frames:
    def feed(self, data):
        self._buffer.extend(data)
        while True:
            if len(self._buffer) < _LENGTH.size:
                return
            end = _LENGTH.size + int.from_bytes(self._buffer[: _LENGTH.size], "little")
            if end > len(self._buffer):
                return
            with memoryview(self._buffer) as view:
                message = view[_LENGTH.size : end].tobytes()
            del self._buffer[:end]
            yield message
