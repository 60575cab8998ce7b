"""Counts the positions of the new tokens from 0 in every step."""

import torch
from model import GrowingCache, Model
from serial import SerialEngine
from sampler import sample


def make(folder, limits, device):
    model = Model(folder)

    def begin():
        cache = GrowingCache()
        return lambda new: model.logits(model(torch.tensor(new), torch.arange(len(new)), cache)[-1])

    return SerialEngine(begin)
