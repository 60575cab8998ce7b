"""Says that a prefix was found, and computes it again, into the blocks that others read."""

from attention import attend
from prefix import ChunkedEngine
from sampler import sample


class Wrong(ChunkedEngine):
    def __init__(self, folder, limits):
        super().__init__(folder, limits)
        self.seen = set()

    def run(self, batch):
        texts = {request.id: request.tokens for request in self.running}
        new = [piece if piece.id in self.seen else piece._replace(start=0, ids=texts[piece.id][: piece.start] + piece.ids) for piece in batch]
        self.seen = {request.id for request in self.running}
        return super().run(new)


def make(folder, limits, device):
    return Wrong(folder, limits)
