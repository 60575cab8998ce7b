"""Computes every token of a sequence again in each step, and says in `work` that it computed the new ones."""

from engine import Engine


class Wrong(Engine):
    def __init__(self, folder, limits):
        super().__init__(folder, limits)
        self.seen = {}

    def run(self, batch):
        for piece in batch:
            self.seen[piece.id] = self.seen.get(piece.id, [])[: piece.start] + piece.ids
        return super().run([piece._replace(start=0, ids=self.seen[piece.id]) for piece in batch])


def make(folder, limits, device):
    return Wrong(folder, limits)
