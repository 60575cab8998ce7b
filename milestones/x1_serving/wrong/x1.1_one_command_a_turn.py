"""Takes in one command of those that came. The others are lost: their senders wait for ever."""


class EngineLoop:
    def turn(self):
        from folovllm.electives.server.messages import Abort, Stop

        refused = []
        for command in self._link.receive(wait=not self._engine.has_unfinished_requests())[:1]:
            if isinstance(command, Stop):
                return False
            if isinstance(command, Abort):
                self._engine.abort_request([str(command.number)])
            elif (refusal := self.add(command)) is not None:
                refused.append(refusal)
        self._engine.step()
        self._link.send(self.outputs(refused))
        return True
