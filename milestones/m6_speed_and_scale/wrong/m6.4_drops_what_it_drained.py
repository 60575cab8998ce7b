"""Overwrites the outputs that were taken in before scheduling."""


class OverlappedEngine:
    def step_overlapped(self):
        outputs = self._collect() if self.scheduler.must_wait() else []
        schedule = self.scheduler.schedule()
        started = self._start(schedule) if schedule.scheduled_seqs else None
        outputs = self._collect()
        self._in_flight = started
        if not self.has_unfinished_requests():
            outputs += self._collect()
        return outputs
