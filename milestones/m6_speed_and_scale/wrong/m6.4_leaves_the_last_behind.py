"""Leaves the last step in flight when nobody is left."""


class OverlappedEngine:
    def step_overlapped(self):
        outputs = self._collect() if self.scheduler.must_wait() else []
        schedule = self.scheduler.schedule()
        started = self._start(schedule) if schedule.scheduled_seqs else None
        outputs += self._collect()
        self._in_flight = started
        return outputs
