"""Drops what is not whole, instead of keeping it for the next piece."""


class Frames:
    def feed(self, data):
        start = 0
        while start + 4 <= len(data):
            end = start + 4 + int.from_bytes(data[start : start + 4], "little")
            if end > len(data):
                break
            yield bytes(data[start + 4 : end])
            start = end
