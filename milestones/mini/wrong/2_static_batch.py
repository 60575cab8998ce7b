"""Lets newcomers in only when nobody runs: a batch ends with its longest answer."""

from engine import Engine


class Wrong(Engine):
    def admit(self, request, budget):
        full = self.running and any(running.computed for running in self.running)
        return 0 if full else super().admit(request, budget)


def make(folder, limits, device):
    return Wrong(folder, limits)
