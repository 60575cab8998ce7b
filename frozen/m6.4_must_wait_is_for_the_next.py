"""Asks must_wait after the new step was started. Input: a scheduler that must wait."""

class OverlappedEngine:
    def step_overlapped(self):
        old = self._in_flight
        new = self._start()
        outputs = self._collect(old) if old is not None else []
        self._in_flight = new
        return outputs
