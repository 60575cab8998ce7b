"""Drops the rest of the division."""


class Pool:
    def share(self, parts):
        things = list(self.free)
        size = len(things) // parts
        return [things[n * size : (n + 1) * size] for n in range(parts)]
