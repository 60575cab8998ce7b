"""Stage 6: plan step n + 1 while the device computes step n."""

from functools import partial
from pathlib import Path

from contract import Device, Limits, Step
from engine import Piece
from prefix import PENDING, ChunkedEngine
from serial import Request


class OverlapEngine(ChunkedEngine):
    """Launches a step before it reads the one before. A token in flight has a placeholder in its sequence.

    Planning needs to know how many tokens there are, never which. So the scheduler is content with placeholders, and
    the device puts in the tokens, which it has sampled itself.
    """

    def __init__(self, folder: Path, limits: Limits, device: Device) -> None:
        super().__init__(folder, limits)
        self.device, self.newest = device, dict[str, int]()  # `newest` is the device's: what its last step has sampled
        self.in_flight: tuple[int, list[tuple[Request, int]]] | None = None  # a ticket, and the places of its tokens

    def step(self) -> Step:
        batch, tables = self.schedule()
        sampling = {piece.id for piece in batch if piece.is_last}
        places = [(request, len(request.tokens)) for request in self.running if request.id in sampling]
        launched = (self.device.launch(partial(self.run, batch)), places) if batch else None
        for piece in batch:
            self.advance(piece, PENDING if piece.is_last else None)
        tokens = self.receive()
        self.in_flight = launched
        return Step([(piece.id, piece.start, len(piece.ids)) for piece in batch], tables, tokens, self.preempted)

    def receive(self) -> dict[str, int]:
        """Read the step before, and put its tokens in their places."""
        if self.in_flight is None:
            return {}
        ticket, places = self.in_flight
        tokens: dict[str, int] = self.device.read(ticket)
        for request, place in places:
            request.tokens[place] = tokens[request.id]
        return tokens

    def run(self, batch: list[Piece]) -> dict[str, int]:
        """On the device: replace each placeholder, which is the newest token of its sequence, by the token."""
        known = [p._replace(ids=[self.newest[p.id] if id == PENDING else id for id in p.ids]) for p in batch]
        self.newest = super().run(known)
        return self.newest
