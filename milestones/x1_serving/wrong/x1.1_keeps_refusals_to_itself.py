"""Does not say who was refused: those wait for ever."""


class EngineLoop:
    def turn(self):
        from folovllm.electives.server.messages import Abort, Stop

        for command in self._link.receive(wait=not self._engine.has_unfinished_requests()):
            if isinstance(command, Stop):
                return False
            if isinstance(command, Abort):
                self._engine.abort_request([str(command.number)])
            else:
                self.add(command)
        self._engine.step()
        self._link.send(self.outputs())
        return True
