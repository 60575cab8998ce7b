"""Does all aborts of a turn before the requests: who asked and left in the same turn is served to the end, for nobody."""


class EngineLoop:
    def turn(self):
        commands = self._link.receive(wait=not self._engine.has_unfinished_requests())
        refused = []
        for c in commands:
            if isinstance(c, Stop):
                return False
            if isinstance(c, Abort):
                self._engine.abort_request([str(c.number)])
        for c in commands:
            if isinstance(c, Add):
                r = self.add(c)
                if r is not None:
                    refused.append(r)
        self._engine.step()
        self._link.send(self.outputs(refused))
        return True
