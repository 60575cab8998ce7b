"""Numbers the tokens of the flat batch from 0 to T: only the first sequence has its own positions."""

from functools import partial

import torch
from engine import Engine


class Wrong(Engine):
    @torch.inference_mode()
    def run(self, batch):
        ids = torch.tensor([id for piece in batch for id in piece.ids])
        positions = torch.arange(len(ids)) + (batch[0].start if batch else 0)
        hidden = self.model(ids, positions, partial(self.attention, batch))
        last = torch.tensor([len(piece.ids) for piece in batch]).cumsum(0) - 1
        tokens = self.model.logits(hidden[last]).argmax(-1).tolist()
        return {piece.id: token for piece, token in zip(batch, tokens)}


def make(folder, limits, device):
    return Wrong(folder, limits)
