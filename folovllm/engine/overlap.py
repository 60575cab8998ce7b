"""Overlap scheduling: while the device runs step i, the host schedules step i + 1 and only then looks at i's tokens.

So the host always acts one step behind. A token that was drawn and has not arrived is *in flight*: it counts for
scheduling, and for nothing else, since nobody on the host knows it. The device does know it and goes on from there.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.scheduler import MakeRoom, Scheduler, SchedulerOutput, TokensOfStep
from folovllm.executor.abstract import Pending
from folovllm.outputs import RequestOutput
from folovllm.request import Sequence


class OverlapScheduler(Scheduler):
    """A `Scheduler` for steps whose tokens arrive late, and whose sequences have rows in the device's tables.

    Invariant: a sequence has a row, its own, exactly while it runs.
    """

    def __init__(self, *, tokens_of_step: TokensOfStep, make_room: MakeRoom, max_num_seqs: int, **rest: Any) -> None:
        super().__init__(
            tokens_of_step=lambda seq, budget: 0 if will_finish(seq) else tokens_of_step(seq, budget),
            make_room=self._make_room_and_free_row,
            max_num_seqs=max_num_seqs,
            **rest,
        )
        self._give_way = make_room
        self._free_rows = list(reversed(range(max_num_seqs)))

    def schedule(self) -> SchedulerOutput:
        """As without overlap; newcomers get a row."""
        output = super().schedule()
        for item in output.scheduled:
            if item.seq.row < 0:
                item.seq.row = self._free_rows.pop()
        return output

    def postprocess(self, output: SchedulerOutput, token_ids: Iterable[int]) -> list[Sequence]:
        """As without overlap, but a sequence that ended while this step was under way gets nothing more."""
        alive = [
            (item, token_id)
            for item, token_id in zip(output.scheduled, token_ids, strict=True)
            if not item.seq.status.is_finished
        ]
        updated = super().postprocess(SchedulerOutput([item for item, _ in alive]), [token_id for _, token_id in alive])
        for seq in updated:
            if seq.status.is_finished:
                self._free_row(seq)
        return updated

    def abort(self, seq: Sequence) -> None:
        """End a sequence at once; what it has in flight is dropped when it arrives."""
        super().abort(seq)
        self._free_row(seq)

    def must_wait(self) -> bool:
        """Whether the next step can only be scheduled once nothing is in flight.

        That is so if somebody may have to give way (a victim's tokens must all be known, to be computed again), or if a
        draw depends on the tokens before it (penalties).
        """
        if any(seq.params.has_penalties for seq in self.running):
            return True
        budget, size = self._max_num_batched_tokens, self.kv.block_size
        if self.kv.num_free > len(self.running) + budget // size:  # room for any step: no need to look closer
            return False
        most_pages = sum(min(seq.num_uncomputed_tokens, budget) // size + 1 for seq in self.running)
        return self.kv.num_free < most_pages

    def _make_room_and_free_row(self, scheduler: Scheduler, candidates: list[Sequence]) -> Sequence | None:
        victim = self._give_way(scheduler, candidates)
        if victim is not None:
            self._free_row(victim)
        return victim

    def _free_row(self, seq: Sequence) -> None:
        if seq.row >= 0:
            self._free_rows.append(seq.row)
            seq.row, seq.num_sent_blocks = -1, 0


def will_finish(seq: Sequence) -> bool:
    """Whether the tokens in flight bring the answer to its full length, so that no step needs to be computed."""
    return seq.num_output_tokens + seq.num_in_flight >= seq.max_tokens


@dataclass(slots=True)
class InFlight:
    """A step that was started and not taken in yet."""

    schedule: SchedulerOutput
    pending: Pending
    start: float


class OverlappedEngine(LLMEngine):
    """An `LLMEngine` that starts a step before it takes in the tokens of the one before."""

    scheduler: OverlapScheduler

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._in_flight: InFlight | None = None
        self._last_arrival = 0.0

    def step(self) -> list[RequestOutput]:
        """Start the next step, then hand out what the step before it drew."""
        return self.step_overlapped()

    def step_overlapped(self) -> list[RequestOutput]:
        """One turn of the loop.

        1. If the scheduler must wait, take in what is in flight first (`_collect`).
        2. Schedule. If there is anything to do, start it with `_start`, which returns what is now in flight; it is not
           waited for.
        3. Take in the step that was in flight before (`_collect`), and remember the new one in `self._in_flight`.
        4. When no request is left, take in the new one too: its tokens belong to nobody.

        Returns:
            What has arrived, in the order of the steps.
        """
        outputs = self._collect() if self.scheduler.must_wait() else []
        schedule = self.scheduler.schedule()
        started = self._start(schedule) if schedule.scheduled else None
        outputs += self._collect()
        self._in_flight = started
        if not self.has_unfinished_requests():
            outputs += self._collect()
        return outputs

    def _start(self, schedule: SchedulerOutput) -> InFlight:
        """Start a step on the device; the tokens that it draws are in flight from here on."""
        started = InFlight(schedule, self.executor.submit(schedule), time.monotonic())
        for item in schedule.scheduled:
            item.seq.num_in_flight += item.draws
        return started

    def _collect(self) -> list[RequestOutput]:
        """Wait for the step in flight, if there is one, and hand its tokens to their sequences."""
        if self._in_flight is None:
            return []
        step, self._in_flight = self._in_flight, None
        result = step.pending.wait()
        for item in step.schedule.scheduled:
            item.seq.num_in_flight -= item.draws
        start, self._last_arrival = max(step.start, self._last_arrival), time.monotonic()
        return self._take_in(step.schedule, result, start)


def make_engine(config: EngineConfig) -> LLMEngine:
    """The engine with the loop that the configuration asks for."""
    engine = OverlappedEngine(config) if config.async_scheduling else LLMEngine(config)
    gc.collect()
    gc.freeze()  # what exists by now stays: a collection that searched it again would stall a step
    return engine
