"""Gives the future a result for each piece of news. The second time it has one already, and that is an InvalidStateError in the middle of a step."""


class OutputCollector:
    def put(self, stream):
        self._fresh.append(stream)
        if self._waiter is not None:
            self._waiter.set_result(None)
