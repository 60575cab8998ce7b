"""Names a block by its own tokens alone: behind another beginning, the same tokens have other K and V."""

from attention import attend
from prefix import ChunkedEngine, PrefixBlocks
from sampler import sample


class NoChain(PrefixBlocks):
    def names(self, tokens):
        size = self.limits.block_size
        for end in range(size, len(tokens) + 1, size):
            yield hash((end, *tokens[end - size : end]))


class Wrong(ChunkedEngine):
    memory_type = NoChain


def make(folder, limits, device):
    return Wrong(folder, limits)
