"""Remembers the work without running it. A real graph captures by running."""


class CpuGraph:
    def capture(self, run):
        self._run = run
        self.static_input.fill_(POISON)
