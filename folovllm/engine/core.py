"""The loop of M1 to M5: schedule a step, have it computed, and hand its tokens to their sequences."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from folovllm.engine.event_stream import Events
from folovllm.engine.logprobs import keep_logprobs
from folovllm.engine.metrics import report_step
from folovllm.engine.output_processor import OutputProcessor, RequestState
from folovllm.engine.scheduler import SchedulerLike
from folovllm.executor.abstract import Executor, Pending
from folovllm.outputs import RequestOutput
from folovllm.request import Sequence, SequenceOutput
from folovllm.step.schedule import SchedulerOutput


@dataclass(slots=True)
class StartedStep:
    """A step that was started and whose tokens were not collected yet."""

    schedule: SchedulerOutput
    seqs: list[Sequence]  # the objects behind `schedule.scheduled_seqs`, in its order: the scheduler has them
    start: float
    pending: Pending


class EngineCore:
    """Serves sequences step by step, until none is left.

    Attributes:
        output_processor: the requests that are being served, by id, and what each has to report.
        num_steps: steps whose tokens have arrived. num_preemptions: sequences that these steps preempted.
        end_early: X1's hook after a step. It gets the sequences, aborts those whose grammar allows no token, and returns their ends.
    """

    def __init__(self, scheduler: SchedulerLike, executor: Executor, events: Events) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.events = events
        self.output_processor = OutputProcessor(scheduler.abort)
        self.num_steps = self.num_preemptions = 0
        self.end_early: Callable[[list[Sequence]], list[SequenceOutput]] | None = None
        self._last_arrival = 0.0  # of a step's tokens

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work."""
        return bool(self.output_processor.requests)

    def step(self) -> list[RequestOutput]:
        """Schedule, compute, sample, and hand out what is new. Without work it returns an empty list."""
        if not self.has_unfinished_requests():
            return []
        try:
            schedule = self.scheduler.schedule()
            if not schedule.scheduled_seqs and (schedule.preempted or schedule.extras):
                return []  # never at M1. M3: the next step uses the preempted one's blocks; X7: K/V is on its way
            return self.collect(self.start(schedule))
        finally:
            self.events.drain()  # after an error, too: listeners then see how it came about

    def start(self, schedule: SchedulerOutput) -> StartedStep:
        """Have a step computed; `collect` processes its tokens."""
        seqs, start = self.scheduler.sequences(schedule), time.monotonic()
        return StartedStep(schedule, seqs, start, self.executor.submit(schedule))

    def collect(self, step: StartedStep) -> list[RequestOutput]:
        """Wait for the tokens of a step, hand them to their sequences, and return what is new of the requests.

        A sequence that ended while the step was under way gets nothing more (M6, where steps overlap).
        """
        result = step.pending.wait()
        arrived = time.monotonic()
        alive = [i for i, seq in enumerate(step.seqs) if not seq.status.is_finished]
        new = self.scheduler.postprocess([(step.seqs[i], result.token_ids[i]) for i in alive])
        if result.logprobs:
            keep_logprobs(step.seqs, step.schedule.scheduled_seqs, result.logprobs, alive)
        now = time.monotonic()
        if self.events.on:  # where steps overlap, a step's time begins where the last one ended
            times = max(step.start, self._last_arrival), arrived, now
            self._last_arrival = arrived
            report_step(self.events, self.scheduler, new, self.num_steps, *times, step.schedule, result)  # `Finished`
        if self.end_early is not None:
            new += self.end_early(step.seqs)
        self.num_steps += 1
        self.num_preemptions += len(step.schedule.preempted)
        return self.output_processor.process(new, now)

    def end(self, request_ids: Collection[str]) -> list[RequestState]:
        """End those of the requests that are being served; returns those that it ended, with what they hold so far."""
        requests = self.output_processor.requests
        ended = [requests.pop(id_) for id_ in dict.fromkeys(request_ids) if id_ in requests]
        self.scheduler.abort(*(seq for state in ended for seq in state.seqs if not seq.status.is_finished))
        self.events.drain()
        for state in ended:
            state.end(time.monotonic())
        return ended
