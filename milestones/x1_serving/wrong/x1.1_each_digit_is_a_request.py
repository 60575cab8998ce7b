"""Hands over a text where a list of texts is asked for: request 12 goes on, and 1 and 2 end instead."""


class EngineLoop:
    def turn(self):
        refused = []
        for command in self._link.receive(wait=not self._engine.has_unfinished_requests()):
            if isinstance(command, Stop):
                return False
            if isinstance(command, Abort):
                self._engine.abort_request(str(command.number))
            elif (refusal := self.add(command)) is not None:
                refused.append(refusal)
        self._engine.step()
        self._link.send(self.outputs(refused))
        return True
