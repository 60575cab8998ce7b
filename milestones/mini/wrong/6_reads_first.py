"""Reads the step before, and then plans: the device waits while the host thinks."""

from functools import partial

from attention import attend
from contract import Step
from overlap import OverlapEngine
from prefix import PENDING
from sampler import sample


class Wrong(OverlapEngine):
    def step(self):
        tokens = self.receive()
        batch, tables = self.schedule()
        sampling = {piece.id for piece in batch if piece.is_last}
        places = [(request, len(request.tokens)) for request in self.running if request.id in sampling]
        self.in_flight = (self.device.launch(partial(self.run, batch)), places) if batch else None
        for piece in batch:
            self.advance(piece, PENDING if piece.is_last else None)
        return Step([(p.id, p.start, len(p.ids)) for p in batch], tables, tokens, self.preempted)


def make(folder, limits, device):
    return Wrong(folder, limits, device)
