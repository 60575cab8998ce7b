"""Remembers the last refusal of a turn alone: the sender of each other one waits for ever."""


class EngineLoop:
    def turn(self):
        refused = []
        for command in self._link.receive(wait=not self._engine.has_unfinished_requests()):
            if isinstance(command, Stop):
                return False
            if isinstance(command, Abort):
                self._engine.abort_request([str(command.number)])
            elif (refusal := self.add(command)) is not None:
                refused = [refusal]
        self._engine.step()
        self._link.send(self.outputs(refused))
        return True
