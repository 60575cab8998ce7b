"""Leaves the last input in place: a replay that forgets to bring its own goes unnoticed."""


class CpuGraph:
    def replay(self, value):
        if self._run is None:
            raise RuntimeError("nothing was captured: call capture first")
        self.static_input.copy_(value)
        self._run(self.static_input)
