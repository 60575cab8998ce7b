"""Says who failed in the step instead of who was refused: the sender of a refused request waits for ever."""


class EngineLoop:
    def turn(self):
        refused = []
        for command in self._link.receive(wait=not self._engine.has_unfinished_requests()):
            if isinstance(command, Stop):
                return False
            if isinstance(command, Abort):
                self._engine.abort_request([str(command.number)])
            elif (refusal := self.add(command)) is not None:
                refused.append(refusal)
        refused = self.step() or refused
        self._link.send(self.outputs(refused))
        return True
