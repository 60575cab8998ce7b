"""The loop of M1 to M5: schedule a step, have it computed, and hand its tokens to their sequences."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from folovllm.engine.event_stream import Events
from folovllm.engine.logits_mask import LogitsMask, abort_broken
from folovllm.engine.logprobs import keep_logprobs
from folovllm.engine.metrics import report_step
from folovllm.engine.output_processor import OutputProcessor, RequestState
from folovllm.engine.scheduler import SchedulerLike
from folovllm.executor.abstract import Executor, Pending
from folovllm.outputs import RequestOutput
from folovllm.request import Sequence
from folovllm.step.schedule import SchedulerOutput


@dataclass(slots=True)
class StartedStep:
    """A step that was started and whose tokens were not collected yet."""

    output: SchedulerOutput
    seqs: list[Sequence]  # those of `output.scheduled_seqs`
    start: float
    pending: Pending | None = None  # None: it has its logits, and waits for its bitmasks


class EngineCore:
    """Serves sequences step by step: `LLMEngine` brings requests in, and calls `step` until none is left.

    Attributes:
        output: the requests that are being served, and what each has to report.
        num_started: steps that were started. num_steps: those whose tokens have arrived. num_preemptions: sequences that these steps preempted.
    """

    def __init__(self, scheduler: SchedulerLike, executor: Executor, events: Events, logits_mask: LogitsMask) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.events = events
        self.logits_mask = logits_mask
        self.output = OutputProcessor(scheduler.abort)
        self.num_started = self.num_steps = self.num_preemptions = 0
        self.has_grammars = False  # whether a request ever had one; until then no step asks the mask
        self._last_arrival = 0.0  # of a step's tokens
        self._unsampled: StartedStep | None = None

    def add_grammar(self, seqs: list[Sequence]) -> None:
        """Register the grammar of a new request. Raises ValueError if the grammar is not supported."""
        self.logits_mask.add(seqs)
        self.has_grammars = True

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work."""
        return bool(self.output.requests)

    def step(self) -> list[RequestOutput]:
        """Schedule, compute, sample, and hand out what is new. Without work it returns an empty list."""
        if not self.has_unfinished_requests():
            return []
        try:
            schedule = self.scheduler.schedule()
            if schedule.preempted and not schedule.scheduled_seqs:
                return []  # the next step uses the blocks of those that were preempted
            return self.collect(self.start(schedule))
        finally:
            self.events.drain()  # after an error, too: listeners then see how it came about

    def start(self, output: SchedulerOutput) -> StartedStep:
        """Have a step computed; `collect` takes in its tokens.

        Where a request has a grammar, the step gets as far as its logits: what it may sample depends on all tokens before.
        If these have not arrived, it samples in the `collect` that brings them; so the device has work meanwhile.
        """
        step = StartedStep(output, self.scheduler.sequences(output), time.monotonic())
        if self.has_grammars and self.logits_mask.needs_mask(output, step.seqs):
            self.executor.forward(output)
            self._unsampled = step
            if self.num_started == self.num_steps:
                self._sample()
        else:
            step.pending = self.executor.submit(output)
        self.num_started += 1
        return step

    def collect(self, step: StartedStep) -> list[RequestOutput]:
        """Wait for the tokens of a step, hand them to their sequences, and return what is new of the requests.

        A sequence that ended while the step was under way gets nothing more.
        """
        assert step.pending is not None
        result = step.pending.wait()
        if self.has_grammars:
            self.logits_mask.accept_tokens(step.seqs, result.token_ids)
            self._sample()
        arrived = time.monotonic()
        alive = [i for i, seq in enumerate(step.seqs) if not seq.status.is_finished]
        new = self.scheduler.postprocess([(step.seqs[i], result.token_ids[i]) for i in alive])
        for i in alive if result.logprobs else ():
            if i in result.logprobs:
                keep_logprobs(step.seqs[i], step.output.scheduled_seqs[i].scores, result.logprobs[i])
        now = time.monotonic()
        if self.events.on:
            start = max(
                step.start, self._last_arrival
            )  # where steps overlap, a step's time begins where the last one ended
            self._last_arrival = arrived
            report_step(
                self.events, self.scheduler, self.executor, new,
                step=self.num_steps, start=start, arrived=arrived, end=now, output=step.output, result=result,
            )  # fmt: skip
        if self.has_grammars:
            new += abort_broken(self.logits_mask, self.scheduler.abort, self.events, step.seqs)
        self.num_steps += 1
        self.num_preemptions += len(step.output.preempted)
        return self.output.process(new, now)

    def _sample(self) -> None:
        """Let the step sample that waits for its bitmasks, if there is one: all tokens before it are known."""
        if self._unsampled is not None:
            step, self._unsampled = self._unsampled, None
            step.pending = self.executor.sample(self.logits_mask.bitmasks(step.output, step.seqs))

    def end(self, request_ids: Collection[str]) -> list[RequestState]:
        """End those of the requests that are being served; returns what there is of them."""
        states = [self.output.requests.pop(id_) for id_ in dict.fromkeys(request_ids) if id_ in self.output.requests]
        self.scheduler.abort(*(seq for state in states for seq in state.seqs if not seq.status.is_finished))
        self.events.drain()
        for state in states:
            state.end(time.monotonic())
        return states
