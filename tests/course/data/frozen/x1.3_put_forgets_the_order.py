"""Streams come newest first. Input: put a, put b, get."""

class OutputCollector:
    def put(self, stream):
        if stream not in self._fresh:
            self._fresh.insert(0, stream) if isinstance(self._fresh, list) else self._fresh.__setitem__(stream, None)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
