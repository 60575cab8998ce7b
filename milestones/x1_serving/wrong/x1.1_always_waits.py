"""Waits for a command before each step. So an answer goes on only when somebody else asks for something: on a quiet server it never ends."""


class EngineLoop:
    def turn(self):
        from folovllm.electives.server.messages import Abort, Stop

        refused = []
        for command in self._link.receive(wait=True):
            if isinstance(command, Stop):
                return False
            if isinstance(command, Abort):
                self._engine.abort_request([str(command.number)])
            elif (refusal := self.add(command)) is not None:
                refused.append(refusal)
        self._engine.step()
        self._link.send(self.outputs(refused))
        return True
