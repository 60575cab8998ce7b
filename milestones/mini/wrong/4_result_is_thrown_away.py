"""Calls attend, throws away what it returns, and attends over a gathered copy of the blocks."""

from attention import TiledEngine, attend
from blocks import PagedEngine
from sampler import sample


class Wrong(TiledEngine):
    def attention(self, batch, layer, query, key, value):
        super().attention(batch, layer, query, key, value)
        counted, self.attend = self.attend, lambda *of: PagedEngine.attend(self, *of)
        try:
            return super().attention(batch, layer, query, key, value)
        finally:
            self.attend = counted


def make(folder, limits, device):
    return Wrong(folder, limits)
