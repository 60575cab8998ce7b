"""Computes in float64, and multiplies complex numbers where the reference turns pairs."""

import torch
from model import GrowingCache, Model
from serial import SerialEngine

from sampler import sample


class Double(Model):
    def __init__(self, folder):
        super().__init__(folder)
        self.weights = {name: weight.double() for name, weight in self.weights.items()}

    def rotate(self, x, positions):
        a, b = x.chunk(2, -1)
        turned = torch.complex(a, b) * torch.exp(1j * positions[:, None, None] * self.frequencies.double())
        return torch.cat((turned.real, turned.imag), -1)


def make(folder, limits, device):
    model = Double(folder)

    def begin():
        cache, tokens = GrowingCache(), []

        def next_logits(new):
            positions = torch.arange(len(tokens), len(tokens) + len(new))
            tokens.extend(new)
            return model.logits(model(torch.tensor(new), positions, cache)[-1])

        return next_logits

    return SerialEngine(begin)
