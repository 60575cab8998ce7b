"""Computes with the placeholder -1 as if it were a token. It is a valid index: the last row of the embedding."""

from attention import attend
from overlap import OverlapEngine
from prefix import ChunkedEngine
from sampler import sample


class Wrong(OverlapEngine):
    def run(self, batch):
        return ChunkedEngine.run(self, batch)


def make(folder, limits, device):
    return Wrong(folder, limits, device)
