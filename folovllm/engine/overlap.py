"""Overlap scheduling: while the device runs step i, the host schedules step i + 1 and only then looks at i's tokens.

So the host always acts one step behind. A token that was sampled and has not arrived is *in flight*: it counts for
scheduling, and for nothing else, since the host does not know it. The device does know it and goes on from there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from folovllm.engine.core import EngineCore
from folovllm.engine.scheduler import Scheduler
from folovllm.executor.abstract import Pending
from folovllm.executor.packed_executor import PackedExecutor
from folovllm.outputs import RequestOutput
from folovllm.request import Sequence
from folovllm.step.schedule import NothingScheduled, SchedulerOutput


@dataclass(slots=True)
class InFlight:
    """A step that was started and whose tokens were not taken in yet."""

    output: SchedulerOutput
    seqs: list[Sequence]  # those of `output.scheduled_seqs`
    pending: Pending | None  # None: it has not sampled yet, and waits for its masks
    start: float


class OverlappedEngine(EngineCore):
    """An `EngineCore` that starts a step before it takes in the tokens of the one before."""

    scheduler: Scheduler
    executor: PackedExecutor

    def __init__(self, *parts: Any) -> None:
        """Takes the parts that `EngineCore` takes."""
        super().__init__(*parts)
        self._in_flight: InFlight | None = None
        self._unsampled: InFlight | None = None  # started up to its logits
        self._last_arrival = 0.0

    def step(self) -> list[RequestOutput]:
        """Start the next step, then hand out what the step before it sampled.

        Raises:
            NothingScheduled: requests are unfinished, but no step was started and none was in flight.
            RequestFailed: as `EngineCore.step`.
        """
        before = self.num_steps
        try:
            outputs = self.step_overlapped()
        finally:
            if self.events.on:
                self.events.drain()
        outputs = self._report(outputs)
        idle = self._in_flight is None and self.num_steps == before and not self.scheduler.has_preempted
        if idle and self.has_unfinished_requests():
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

    def _start(self, output: SchedulerOutput) -> InFlight:
        """Start a step on the device; the tokens that it samples are in flight from here on.

        If some of its answers have a grammar, it gets as far as its logits: what they may sample depends on the tokens
        that are still in flight. So the device has work while the host waits for these.
        """
        seqs = self.scheduler.sequences(output)
        if self.has_grammars and self.logits_mask.needs_mask(output, seqs):
            self.executor.forward(output)
            started = self._unsampled = InFlight(output, seqs, None, time.monotonic())
        else:
            started = InFlight(output, seqs, self.executor.submit(output), time.monotonic())
        return started

    def _collect(self) -> list[RequestOutput]:
        """Wait for the step in flight, if there is one, and hand its tokens to their sequences.

        A sequence that ended while the step was under way gets nothing more. As soon as the tokens are known, the step after
        it samples, if it waits for that.
        """
        step = self._in_flight
        if step is None or step is self._unsampled:
            self._sample_deferred()
        if step is None:
            return []
        assert step.pending is not None
        result = step.pending.wait()
        self._in_flight = None  # only now: what cannot arrive is an error in every later step too
        if self.has_grammars:
            self.logits_mask.accept_tokens(step.seqs, result.token_ids)
        self._sample_deferred()
        start, self._last_arrival = max(step.start, self._last_arrival), time.monotonic()
        return self._take_in(step.output, step.seqs, result, start)

    def _sample_deferred(self) -> None:
        """Let the waiting step sample, if there is one: the mask has taken in all tokens before its own."""
        if self._unsampled is not None:
            step, self._unsampled = self._unsampled, None
            step.pending = self.executor.sample(self.logits_mask.bitmasks(step.output, step.seqs))
