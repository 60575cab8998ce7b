"""Stores the new step and collects that: correct, and nothing overlaps."""


class OverlappedEngine:
    def step_overlapped(self):
        outputs = self._collect() if self.scheduler.must_wait() else []
        schedule = self.scheduler.schedule()
        started = self._start(schedule) if schedule.scheduled_seqs else None
        self._in_flight = started
        outputs += self._collect()
        if not self.has_unfinished_requests():
            outputs += self._collect()
        return outputs
