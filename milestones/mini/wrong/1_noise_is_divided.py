"""Adds the noise before it divides by the temperature."""

from model import own_model
from serial import SerialEngine


def sample(logits, temperature, noise):
    return int(logits.argmax() if temperature == 0 else ((logits + noise) / temperature).argmax())


def make(folder, limits, device):
    return SerialEngine(own_model(folder))
