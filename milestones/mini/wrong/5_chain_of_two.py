"""Names a block by its own tokens and those of the block before it: what is before both has changed K and V, too."""

from attention import attend
from prefix import ChunkedEngine, PrefixBlocks
from sampler import sample


class Names(PrefixBlocks):
    def names(self, tokens):
        size = self.limits.block_size
        for end in range(size, len(tokens) + 1, size):
            yield hash((end, *tokens[max(0, end - 2 * size) : end]))


class Wrong(ChunkedEngine):
    memory_type = Names


def make(folder, limits, device):
    return Wrong(folder, limits)
