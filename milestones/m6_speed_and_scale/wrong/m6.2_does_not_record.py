"""Remembers the work without running it. A real graph records by running."""


class RecordedGraph:
    def capture(self, run):
        self._run = run
        self.static_input.fill_(POISON)
