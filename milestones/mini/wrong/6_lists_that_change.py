"""Launches the block tables themselves: when the device looks at them, they are those of a later step, or gone."""

from attention import attend
from overlap import OverlapEngine
from sampler import sample


class Wrong(OverlapEngine):
    def run(self, batch):
        tables = self.memory.tables
        return super().run([piece._replace(table=tables.get(piece.id, piece.table[:1] * len(piece.table))) for piece in batch])


def make(folder, limits, device):
    return Wrong(folder, limits, device)
