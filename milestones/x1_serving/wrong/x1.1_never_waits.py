"""Never waits. An idle engine turns as fast as it can, uses a whole core for nothing, and sends thousands of empty messages a second."""


class EngineLoop:
    def turn(self):
        from folovllm.electives.server.messages import Abort, Stop

        refused = []
        for command in self._link.receive(wait=False):
            if isinstance(command, Stop):
                return False
            if isinstance(command, Abort):
                self._engine.abort_request([str(command.number)])
            elif (refusal := self.add(command)) is not None:
                refused.append(refusal)
        self._engine.step()
        self._link.send(self.outputs(refused))
        return True
