"""Takes temperatures under 0.3 for greedy."""

from model import own_model
from serial import SerialEngine


def sample(logits, temperature, noise):
    return int(logits.argmax() if temperature < 0.3 else (logits / temperature + noise).argmax())


def make(folder, limits, device):
    return SerialEngine(own_model(folder))
