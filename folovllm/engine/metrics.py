"""What the engine reports about itself: figures of each step, and the state of its cache."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from folovllm.engine import events as ev
from folovllm.engine.event_stream import Events
from folovllm.engine.scheduler import SchedulerLike
from folovllm.engine.setup import EngineSetup
from folovllm.request import SequenceOutput
from folovllm.step.schedule import SchedulerOutput, StepResult


def report_step(
    events: Events, scheduler: SchedulerLike, new: Iterable[SequenceOutput], step: int, start: float, arrived: float, end: float,
    output: SchedulerOutput, result: StepResult,
) -> None:  # fmt: skip
    """Tell listeners that a step has ended (`StepEnded`), and which sequences with it."""
    for source in events.sources.values():
        events.emit(source())
    used = 0 if scheduler.kv is None else scheduler.kv.num_used
    events.emit(ev.StepEnded(step, start, arrived, end, output, result, len(scheduler.waiting), used))
    for seq, _, status in new:
        if status is not None:
            events.emit(ev.Finished(seq.seq_id, status.value))


SHOWN = (("offloaded", "host"), ("loaded", "host"), ("loaded", "disk"))  # what moved, and where


@dataclass(slots=True, frozen=True)
class StepStats:
    """One step, for `--show-steps`, plots and benchmarks."""

    index: int
    start: float  # seconds of a monotonic clock
    seconds: float
    waiting: int  # sequences, after the step was scheduled
    running: int
    num_prefill_tokens: int
    num_decode_tokens: int
    preempted: int
    kv_blocks_used: int
    scheduled_seqs: tuple[tuple[str, int, int, int], ...]  # (request_id, index, first token, number of tokens)
    num_draft_tokens: int = 0  # draft tokens that were verified
    num_accepted: int = 0  # and accepted
    num_offloaded: int = 0  # blocks that left the device for host memory
    num_loaded: int = 0  # and that came back
    experts: tuple[tuple[int, ...], ...] = ()  # [L][E], how often asked since the step before, where that is counted

    @property
    def num_tokens(self) -> int:
        """T: tokens computed in the step."""
        return self.num_prefill_tokens + self.num_decode_tokens


def imbalance(counts: SequenceOf[int]) -> float:
    """The busiest of a layer's experts [E], in multiples of an equal share: 1 if all are asked alike, or none was asked."""
    return max(counts) * len(counts) / sum(counts) if any(counts) else 1.0


class StepLog:
    """A listener that keeps each step's figures."""

    def __init__(self, steps: list[StepStats] | None = None) -> None:
        self.steps = [] if steps is None else steps
        self._added: dict[int, ev.RequestAdded] = {}  # by seq_id: the sequences that are served
        self._begun: dict[int, list[ev.RequestAdded | None]] = {}  # by step in flight: whose its sequences are
        self._figures: dict[str, Any] = {}  # fields of the step that is being processed, from events before its end
        self._total: SequenceOf[SequenceOf[int]] = ()  # of the last `ExpertsAsked`

    def __call__(self, events: SequenceOf[ev.Event]) -> None:
        """Take in what happened."""
        for event in events:
            if isinstance(event, ev.StepBegan):
                self._begun[event.step] = self._owners(event.output)
            elif isinstance(event, ev.StepEnded):
                self.steps.append(self._stats(event))
                self._figures = {}
            elif isinstance(event, ev.DraftsVerified):
                for name in ("num_draft_tokens", "num_accepted"):
                    self._figures[name] = self._figures.get(name, 0) + getattr(event, name)
            elif isinstance(event, ev.BlocksMoved) and (event.what, event.place) in SHOWN:
                name = f"num_{event.what}"
                self._figures[name] = self._figures.get(name, 0) + event.num_blocks
            elif isinstance(event, ev.ExpertsAsked):
                pairs = zip(self._total, event.counts, strict=bool(self._total))
                self._figures["experts"] = tuple(tuple(b - a for a, b in zip(*layer, strict=True)) for layer in pairs)
                self._total = event.counts
            elif isinstance(event, ev.RequestAdded):
                self._added[event.seq_id] = event
            elif isinstance(event, ev.Finished | ev.Aborted):
                self._added.pop(event.seq_id, None)
            elif isinstance(event, ev.Snapshot):
                self._added = {seq.added.seq_id: seq.added for seq in event.sequences}

    def take(self) -> list[StepStats]:
        """The steps since the last time: with overlap, a turn of the loop takes in none, one or two."""
        steps, self.steps = self.steps, []
        return steps

    def _owners(self, output: SchedulerOutput) -> list[ev.RequestAdded | None]:
        """Whose each scheduled sequence is; None for one that ended before anybody listened."""
        return [self._added.get(scheduled.seq_id) for scheduled in output.scheduled_seqs]

    def _stats(self, event: ev.StepEnded) -> StepStats:
        """A step's figures. Sequences may have ended since it began, or it was in flight as the log began to listen."""
        owners = self._begun.pop(event.step, None) or self._owners(event.output)
        decodes, scheduled_seqs = 0, []
        for scheduled, added in zip(event.output.scheduled_seqs, owners, strict=True):
            if added is not None:
                is_behind = scheduled.start >= len(added.prompt_token_ids)
                if is_behind and scheduled.num_new_tokens == max(1, scheduled.num_samples):
                    decodes += scheduled.num_new_tokens
                scheduled_seqs.append((added.request_id, added.answer, scheduled.start, scheduled.num_new_tokens))
        return StepStats(
            index=event.step,
            start=event.start,
            seconds=event.end - event.start,
            waiting=event.waiting,
            running=len(event.output.scheduled_seqs),
            num_prefill_tokens=event.output.num_tokens - decodes,
            num_decode_tokens=decodes,
            preempted=len(event.output.preempted),
            kv_blocks_used=event.kv_blocks_used,
            scheduled_seqs=tuple(scheduled_seqs),
            **self._figures,
        )


@dataclass(slots=True, frozen=True)
class EngineStats:
    """The engine now, and its KV cache: what is reserved, and what of it holds a token."""

    waiting: int
    running: int
    steps: int
    preemptions: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_tokens_stored: int
    kv_bytes_total: int
    kv_bytes_reserved: int
    kv_bytes_used: int

    @property
    def kv_waste(self) -> float:
        """Share of the reserved bytes that hold no token."""
        return 1 - self.kv_bytes_used / self.kv_bytes_reserved if self.kv_bytes_reserved else 0.0


def engine_stats(setup: EngineSetup, scheduler: SchedulerLike, num_steps: int, num_preemptions: int) -> EngineStats:
    """Requests and KV cache as they are now. A cache that is no pool of blocks counts as 0 blocks."""
    kv, running = scheduler.kv, scheduler.running
    num_blocks, num_used = (0, 0) if kv is None else (kv.num_blocks, kv.num_used)
    bytes_per_token = setup.kv_bytes_per_token
    bytes_per_block = setup.block_size * bytes_per_token
    num_shared = sum(len(seq.block_table) for seq in running) - num_used  # blocks are full before they are shared
    stored = sum(seq.num_computed_tokens for seq in running) - num_shared * setup.block_size
    return EngineStats(
        waiting=len(scheduler.waiting),
        running=len(running),
        steps=num_steps,
        preemptions=num_preemptions,
        kv_blocks_total=num_blocks,
        kv_blocks_used=num_used,
        kv_tokens_stored=stored,
        kv_bytes_total=num_blocks * bytes_per_block,
        kv_bytes_reserved=num_used * bytes_per_block,
        kv_bytes_used=stored * bytes_per_token,
    )
