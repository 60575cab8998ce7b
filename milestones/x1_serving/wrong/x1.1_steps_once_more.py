"""Makes a last step after it was told to stop, for nobody."""


class EngineLoop:
    def turn(self):
        from folovllm.electives.server.messages import Abort, Stop

        refused, goes_on = [], True
        for command in self._link.receive(wait=not self._engine.has_unfinished_requests()):
            if isinstance(command, Stop):
                goes_on = False
            elif isinstance(command, Abort):
                self._engine.abort_request([str(command.number)])
            elif (refusal := self.add(command)) is not None:
                refused.append(refusal)
        self._engine.step()
        self._link.send(self.outputs(refused))
        return goes_on
