"""A replay runs on the new value itself, beside copying it. Input: any; what `run` gets is not the static input."""

class CpuGraph:
    def replay(self, value):
        if self._run is None:
            raise RuntimeError("call capture before replay")
        self.static_input.copy_(value)
        self._run(value)
        self.static_input.fill_(POISON)
