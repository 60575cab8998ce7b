"""Schedules without the tokens in flight even where a sequence may have to give way: it is computed again, and not all of it is known."""


class OverlappedEngine:
    def step_overlapped(self):
        outputs = []
        schedule = self.scheduler.schedule()
        started = self._start(schedule) if schedule.scheduled_seqs else None
        outputs += self._collect()
        self._in_flight = started
        if not self.has_unfinished_requests():
            outputs += self._collect()
        return outputs
