"""Makes its step first and takes in what has arrived afterwards. Everybody waits a step longer, who asks and who goes."""


class EngineLoop:
    def turn(self):
        from folovllm.electives.server.messages import Abort, Stop

        refused = []
        commands = self._link.receive(wait=not self._engine.has_unfinished_requests())
        self._engine.step()
        for command in commands:
            if isinstance(command, Stop):
                return False
            if isinstance(command, Abort):
                self._engine.abort_request([str(command.number)])
            elif (refusal := self.add(command)) is not None:
                refused.append(refusal)
        self._link.send(self.outputs(refused))
        return True
