"""Has a list of blocks, and writes token by token. Only the harness sees them as one tensor."""

import torch
from blocks import PagedEngine
from model import causal_attention
from sampler import sample


class Listed(PagedEngine):
    def __init__(self, folder, limits):
        super().__init__(folder, limits)
        self.blocks = self.cache.unbind(2)  # each [L, 2, B, Hkv, D]

    def attention(self, batch, layer, query, key, value):
        row, out = 0, []
        for piece in batch:
            first = row
            for position in range(piece.start, piece.start + len(piece.ids)):
                block, place = divmod(position, self.limits.block_size)
                self.blocks[piece.table[block]][layer, :, place] = torch.stack((key[row], value[row]))
                row += 1
            kv = torch.cat([self.blocks[block][layer] for block in piece.table], 1)[:, :position + 1]
            out.append(causal_attention(query[first:row], *kv, piece.start))
        return torch.cat(out)


def make(folder, limits, device):
    return Listed(folder, limits)
