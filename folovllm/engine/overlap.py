"""Overlap scheduling: while the device runs step i, the host schedules step i + 1 and only then looks at i's tokens.

So the host always acts one step behind. A token that was sampled and has not arrived is *in flight*: it counts for
scheduling, and for nothing else, since the host does not know it. The device does know it and goes on from there.
"""

from __future__ import annotations

from folovllm.engine.connected_scheduler import ConnectedScheduler
from folovllm.engine.core import EngineCore, StartedStep
from folovllm.engine.scheduler import Scheduler
from folovllm.outputs import RequestOutput
from folovllm.step.schedule import NothingScheduled


class OverlappedEngine:
    """The other step over the parts of an `EngineCore`: it starts a step before it collects the tokens of the one before."""

    def __init__(self, core: EngineCore) -> None:
        assert isinstance(core.scheduler, Scheduler | ConnectedScheduler), (
            "steps overlap over `Scheduler`, which knows when to wait"
        )
        self.core = core
        self.scheduler = core.scheduler
        self._start = core.start
        self._in_flight: StartedStep | None = None

    def step(self) -> list[RequestOutput]:
        """Start the next step, then hand out what the step before it sampled. Raises `NothingScheduled` if requests wait for ever."""
        core, before = self.core, self.core.num_steps
        try:
            outputs = self.step_overlapped()
        finally:
            if core.events.on:
                core.events.drain()
        idle = self._in_flight is None and core.num_steps == before and not self.scheduler.has_preempted
        if idle and core.output_processor.requests:
            raise NothingScheduled
        return outputs

    def step_overlapped(self) -> list[RequestOutput]:
        """One turn of the loop: a step runs on the device while the host takes in the tokens of the step before.

        So the new step is started (`_start`) before the old one is taken in (`_collect`). Only where the scheduler must wait
        for tokens (`must_wait`) comes the old one first. An empty schedule starts nothing. Afterwards `self._in_flight` is
        the step that this turn started, or None. Without unfinished requests nothing stays in flight: the new step's tokens
        belong to no request, and are taken in too.

        Returns:
            What has arrived, in the order of the steps.
        """
        outputs = self._collect() if self.scheduler.must_wait() else []
        schedule = self.scheduler.schedule()
        started = self._start(schedule) if schedule.scheduled_seqs else None
        outputs += self._collect()
        self._in_flight = started
        if not self.has_unfinished_requests():
            outputs += self._collect()
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self.core.output_processor.requests)

    def _collect(self) -> list[RequestOutput]:
        """Wait for the step in flight, if there is one, and hand its tokens to their sequences."""
        if self._in_flight is None:
            return []
        outputs = self.core.collect(self._in_flight)
        self._in_flight = None  # only now: what cannot arrive is an error in every later step too
        return outputs
