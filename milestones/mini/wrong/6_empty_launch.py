"""Launches nothing behind each step and reads the step at once: the device has that to do, and the host waits all the same."""

from attention import attend
from overlap import OverlapEngine
from sampler import sample


class Empty:
    def __init__(self, device):
        self.device, self.results = device, {}

    def launch(self, work):
        ticket = self.device.launch(work)
        self.device.launch(lambda: None)
        self.results[ticket] = self.device.read(ticket)
        return ticket

    def read(self, ticket):
        return self.results.pop(ticket)


def make(folder, limits, device):
    return OverlapEngine(folder, limits, Empty(device))
