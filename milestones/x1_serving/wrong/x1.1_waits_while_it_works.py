"""The condition the wrong way round: waits while there is work, and spins while there is none."""


class EngineLoop:
    def turn(self):
        from folovllm.electives.server.messages import Abort, Stop

        refused = []
        for command in self._link.receive(wait=self._engine.has_unfinished_requests()):
            if isinstance(command, Stop):
                return False
            if isinstance(command, Abort):
                self._engine.abort_request([str(command.number)])
            elif (refusal := self.add(command)) is not None:
                refused.append(refusal)
        self._engine.step()
        self._link.send(self.outputs(refused))
        return True
