"""Computes each step on the host, and launches a function that returns the tokens."""

from attention import attend
from overlap import OverlapEngine
from sampler import sample


class Host:
    def __init__(self, device):
        self.device, self.read = device, device.read

    def launch(self, work):
        tokens = work()
        return self.device.launch(lambda: tokens)


def make(folder, limits, device):
    return OverlapEngine(folder, limits, Host(device))
