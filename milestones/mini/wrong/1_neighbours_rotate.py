"""RoPE turns the pairs (2i, 2i + 1), as the paper writes it. The checkpoints are made for the pairs (i, i + D/2)."""

import torch
from model import Model, own_model
from serial import SerialEngine
from sampler import sample


def rotate(self, x, positions):
    angles = positions[:, None, None] * self.frequencies
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1).flatten(-2)


def make(folder, limits, device):
    Model.rotate = rotate
    return SerialEngine(own_model(folder))
