"""With nothing to schedule it returns, though a step is in flight: its tokens never arrive."""


class OverlappedEngine:
    def step_overlapped(self):
        outputs = self._collect() if self.scheduler.must_wait() else []
        schedule = self.scheduler.schedule()
        if not schedule.scheduled_seqs:
            return outputs
        started = self._start(schedule)
        outputs += self._collect()
        self._in_flight = started
        if not self.has_unfinished_requests():
            outputs += self._collect()
        return outputs
