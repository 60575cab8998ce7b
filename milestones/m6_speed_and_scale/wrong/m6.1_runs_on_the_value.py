"""Runs the work over the caller's tensor. On a GPU the graph would read the old address."""


class CpuGraph:
    def replay(self, value):
        if self._run is None:
            raise RuntimeError("nothing was captured: call capture first")
        self._run(value)
        self.static_input.fill_(POISON)
