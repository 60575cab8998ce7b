"""Looks for theta in `rope_parameters` alone: in older files it is `rope_theta`, and 10,000 is no good guess."""

import torch
from model import Model
from model import own_model
from serial import SerialEngine
from sampler import sample


class Wrong(Model):
    def __init__(self, folder):
        super().__init__(folder)
        theta, dim = self.config.get("rope_parameters", {}).get("rope_theta", 10000), self.config["head_dim"]
        self.frequencies = theta ** (-torch.arange(0, dim, 2) / dim)


def make(folder, limits, device):
    own_model.__globals__["Model"] = Wrong
    return SerialEngine(own_model(folder))
