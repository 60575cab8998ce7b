"""Asks whether a request is left before it takes in the tokens that may end it: the loop is not called again, and the last step stays in flight."""


class OverlappedEngine:
    def step_overlapped(self):
        outputs = self._collect() if self.scheduler.must_wait() else []
        schedule = self.scheduler.schedule()
        started = self._start(schedule) if schedule.scheduled_seqs else None
        done = not self.has_unfinished_requests()
        outputs += self._collect()
        self._in_flight = started
        if done:
            outputs += self._collect()
        return outputs
