"""Notes the news and wakes nobody. Who waits already waits on, until somebody else's news comes, and then, too."""


class OutputCollector:
    def put(self, stream):
        self._fresh.append(stream)
