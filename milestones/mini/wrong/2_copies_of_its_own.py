"""Stores K and V in engine.cache and attends over copies that it keeps for itself."""

import torch
from engine import Engine
from model import causal_attention


class Wrong(Engine):
    def __init__(self, folder, limits):
        super().__init__(folder, limits)
        self.copies = {}

    def attention(self, batch, layer, query, key, value):
        sizes, out = [len(piece.ids) for piece in batch], []
        for piece, q, k, v in zip(batch, query.split(sizes), key.split(sizes), value.split(sizes)):
            self.store(layer, piece, torch.stack((k, v)))
            old = self.copies.get((piece.id, layer), torch.stack((k, v))[:, :0])[:, : piece.start]
            kv = self.copies[piece.id, layer] = torch.cat((old, torch.stack((k, v))), 1)
            out.append(causal_attention(q, *kv, piece.start))
        return torch.cat(out)


def make(folder, limits, device):
    return Wrong(folder, limits)
