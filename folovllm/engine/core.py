"""The loop of M1 to M5: schedule a step, have it computed, and hand its tokens to their sequences."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import replace

from folovllm.engine.logits_mask import LogitsMask
from folovllm.engine.output_processor import OutputProcessor, RequestState
from folovllm.engine.scheduler import SchedulerLike
from folovllm.event_stream import Events
from folovllm.events import ExpertsAsked, Finished, GivenUp, StepEnded
from folovllm.executor.abstract import Executor
from folovllm.faults import Faults
from folovllm.outputs import RequestOutput
from folovllm.request import Sequence
from folovllm.step.schedule import SchedulerOutput, StepResult

logger = logging.getLogger("folovllm")


class EngineCore:
    """Serves sequences step by step: `LLMEngine` brings requests in, and calls `step` until none is left.

    Attributes:
        output: the requests that are being served, and what each has to report.
        num_steps: steps whose tokens have arrived. num_preemptions: sequences that these steps preempted.
    """

    def __init__(
        self, scheduler: SchedulerLike, executor: Executor, events: Events, logits_mask: LogitsMask, faults: Faults
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.events = events
        self.logits_mask = logits_mask
        self.output = OutputProcessor(faults)
        self.num_steps = self.num_preemptions = 0
        self._faults = faults
        self.has_grammars = False  # whether a request ever had one; until then no step asks the mask

    def add_grammar(self, seqs: list[Sequence]) -> None:
        """Register the grammar of a new request. Raises ValueError if the grammar is not supported."""
        self.logits_mask.add(seqs)
        self.has_grammars = True

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work."""
        return bool(self.output.requests)

    def step(self) -> list[RequestOutput]:
        """Schedule, compute, sample, and hand out what is new. Without work it returns an empty list.

        Raises:
            RequestFailed: requests ran into faults of their own and are gone. It has the outputs of the others, and the step is
                complete: the engine goes on.
        """
        if not self.has_unfinished_requests():
            return []
        try:
            start = time.monotonic()
            output = self.scheduler.schedule()
            if output.preempted and not output.scheduled_seqs:
                return self._report([])  # the next step uses the blocks of those that were preempted
            seqs = self.scheduler.sequences(output)
            outputs = self._take_in(output, seqs, self._compute(output, seqs), start)
        finally:
            if self.events.on:  # after an error, too: listeners then see how it came about
                self.events.drain()
        return self._report(outputs)

    def _compute(self, output: SchedulerOutput, seqs: list[Sequence]) -> StepResult:
        """Compute a step and sample. With structured output, apply the token bitmask and pass the sampled tokens to the grammar."""
        if not self.has_grammars:
            return self.executor.execute_model(output)
        if self.logits_mask.needs_mask(output, seqs):
            output = replace(output, masks=self.logits_mask.bitmasks(output, seqs))
        result = self.executor.execute_model(output)
        self.logits_mask.accept_tokens(seqs, result.token_ids)
        return result

    def _take_in(
        self, output: SchedulerOutput, seqs: list[Sequence], result: StepResult, start: float
    ) -> list[RequestOutput]:
        """Hand the tokens of a step that began at `start` to their sequences; returns what is new."""
        arrived = time.monotonic()
        alive = [i for i, seq in enumerate(seqs) if not seq.status.is_finished]
        # Tokens from before a grammar failed still count, and may end an answer.
        broken = self.logits_mask.broken(seqs) if self.has_grammars else []
        counts = [i for i in alive if result.token_ids[i] or seqs[i] not in broken]
        updated = self._faults.each(self.scheduler.postprocess, [(seqs[i], result.token_ids[i]) for i in counts])
        if broken:
            broken = self.logits_mask.broken(broken)
        if result.logprobs:
            for i in alive:
                if i in result.logprobs:
                    with self._faults.at(seqs[i]):
                        self.output.keep_logprobs(seqs[i], output.scheduled_seqs[i].scores, result.logprobs[i])
        now = time.monotonic()
        if self.events.on:
            kv, waiting = self.scheduler.kv, len(self.scheduler.waiting)
            used = 0 if kv is None else kv.num_used
            if self.events.wants_experts:
                self.events.emit(ExpertsAsked(self.executor.expert_load()))
            self.events.emit(StepEnded(self.num_steps, start, arrived, now, output, result, waiting, used))
            for seq in (seqs[i] for i in alive if seqs[i].status.is_finished):
                self.events.emit(Finished(seq.seq_id, seq.status.value))
        if broken:
            self._give_up(broken)
        self.num_steps += 1
        self.num_preemptions += len(output.preempted)
        outputs = self.output.outputs([*updated, *broken], now)
        if self._faults.of:
            self.end(self._faults.of)
        return outputs

    def _report(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Return the outputs of a step. Raises `RequestFailed` if requests have failed; they have ended by then."""
        if not self._faults.of:
            return outputs
        self.end(self._faults.of)
        return self._faults.report(outputs)

    def _give_up(self, broken: list[Sequence]) -> None:
        """End answers that can no longer satisfy their grammar, with finish_reason "abort"."""
        for seq in broken:
            logger.warning("request %s ends early: its answer can no longer satisfy its grammar", seq.request_id)
            if self.events.on:
                self.events.emit(GivenUp(seq.seq_id))
        self.scheduler.abort(*broken)

    def end(self, request_ids: Collection[str]) -> list[RequestState]:
        """End those of the requests that are being served; returns what there is of them."""
        states = [self.output.requests.pop(id_) for id_ in dict.fromkeys(request_ids) if id_ in self.output.requests]
        self.scheduler.abort(*(seq for state in states for seq in state.seqs if not seq.status.is_finished))
        self.events.drain()
        for state in states:
            state.note_progress(time.monotonic())
        return states
