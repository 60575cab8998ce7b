"""Poisons before it captures: the work runs on nonsense, and a model that looks up token -2**30 ends there."""


class CpuGraph:
    def capture(self, run):
        self.static_input.fill_(POISON)
        run(self.static_input)
        self._run = run
