"""Hands out at most one message for each piece. The second one of a piece comes with the next piece, or never."""


class Frames:
    def feed(self, data):
        self._buffer += data
        if len(self._buffer) >= 4:
            end = 4 + int.from_bytes(self._buffer[:4], "little")
            if len(self._buffer) >= end:
                yield bytes(self._buffer[4:end])
                del self._buffer[:end]
