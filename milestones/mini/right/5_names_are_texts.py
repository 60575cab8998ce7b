"""A name is the text itself: all tokens up to a block's end. Blocks lie in a cache of other strides."""

import torch
from attention import attend
from prefix import ChunkedEngine, PrefixBlocks
from sampler import sample


class Texts(PrefixBlocks):
    def names(self, tokens):
        size = self.limits.block_size
        return (",".join(map(str, tokens[:end])) for end in range(size, len(tokens) + 1, size))


class Engine(ChunkedEngine):
    memory_type = Texts

    def __init__(self, folder, limits):
        super().__init__(folder, limits)
        layers, _, blocks, size, heads, dim = self.cache.shape
        self.cache = torch.zeros(blocks, 2, layers, heads, size, dim).permute(2, 1, 0, 4, 3, 5)


def make(folder, limits, device):
    return Engine(folder, limits)
