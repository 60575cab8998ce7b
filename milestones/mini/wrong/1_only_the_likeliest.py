"""Samples from the 50 most likely tokens."""

import torch
from model import own_model
from serial import SerialEngine


def sample(logits, temperature, noise):
    return int(logits.argmax() if temperature == 0 else (logits / temperature + noise).masked_fill(logits < logits.topk(min(50, len(logits))).values[-1], -torch.inf).argmax())


def make(folder, limits, device):
    return SerialEngine(own_model(folder))
