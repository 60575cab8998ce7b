"""RMSNorm adds 1e-6, whatever `rms_norm_eps` is."""

import torch
from model import Model, own_model
from serial import SerialEngine
from sampler import sample


def norm(self, x, name):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weights[f"{name}.weight"]


def make(folder, limits, device):
    Model.norm = norm
    return SerialEngine(own_model(folder))
