"""Sends a message only if there is a token in it. A refusal then stays behind, and its sender waits for ever."""


class EngineLoop:
    def turn(self):
        from folovllm.electives.server.messages import Abort, Stop

        refused = []
        for command in self._link.receive(wait=not self._engine.has_unfinished_requests()):
            if isinstance(command, Stop):
                return False
            if isinstance(command, Abort):
                self._engine.abort_request([str(command.number)])
            elif (refusal := self.add(command)) is not None:
                refused.append(refusal)
        self._engine.step()
        news = self.outputs(refused)
        if news.deltas:
            self._link.send(news)
        return True
