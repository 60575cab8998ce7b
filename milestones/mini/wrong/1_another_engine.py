"""Imports another engine by a name that no import statement has."""

import importlib

from model import own_model
from serial import SerialEngine
from sampler import sample


def make(folder, limits, device):
    importlib.import_module("folo" + "vllm")
    return SerialEngine(own_model(folder))
