"""Static batching: newcomers come in when the whole batch has ended."""

from __future__ import annotations

from folovllm.learn.builders.reference import Scheduler as Right
from folovllm.step.schedule import SchedulerOutput


class Scheduler(Right):
    def schedule(self) -> SchedulerOutput:
        if not self.running:
            return super().schedule()
        waiting, self.waiting = self.waiting, []
        output = super().schedule()
        self.waiting = waiting
        return output
