"""Takes in the old step before it starts the new one: the device waits for the host."""


class OverlappedEngine:
    def step_overlapped(self):
        outputs = self._collect()
        schedule = self.scheduler.schedule()
        started = self._start(schedule) if schedule.scheduled_seqs else None
        outputs += self._collect()
        self._in_flight = started
        if not self.has_unfinished_requests():
            outputs += self._collect()
        return outputs
