"""Returns None instead of raising when there is nothing left."""


class Pool:
    def take(self):
        return self.free.popleft() if self.free else None
