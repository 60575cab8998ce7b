"""Takes the length for that of the frame, its own four bytes with it: each message loses its end."""


class Frames:
    def feed(self, data):
        self._buffer += data
        while len(self._buffer) >= 4:
            end = max(4, int.from_bytes(self._buffer[:4], "little"))
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[4:end])
            del self._buffer[:end]
