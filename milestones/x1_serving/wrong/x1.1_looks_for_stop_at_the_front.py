"""Looks for Stop at the front only: behind another command it is overlooked, and the engine never ends."""


class EngineLoop:
    def turn(self):
        commands = self._link.receive(wait=not self._engine.has_unfinished_requests())
        refused = []
        if commands and isinstance(commands[0], Stop):
            return False
        for c in commands:
            if isinstance(c, Abort):
                self._engine.abort_request([str(c.number)])
            elif isinstance(c, Add) and (r := self.add(c)) is not None:
                refused.append(r)
        self._engine.step()
        self._link.send(self.outputs(refused))
        return True
