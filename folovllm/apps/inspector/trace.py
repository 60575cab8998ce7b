"""Chrome trace events: the steps, the requests and the cache as tracks, for ui.perfetto.dev or chrome://tracing.

The format is Google's "Trace Event Format": "X" is a span, "C" a counter, "i" an instant, "M" names a track.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from folovllm.engine import events as ev
from folovllm.engine.llm_engine import LLMEngine
from folovllm.models.written_files import write_whole

ENGINE, REQUESTS = 1, 2  # processes, as Perfetto calls a group of tracks
SCHEDULE, DEVICE, POSTPROCESS = 1, 2, 3  # tracks of the engine
TRACKS = {SCHEDULE: "schedule", DEVICE: "device: model and sampling", POSTPROCESS: "postprocess"}


class Trace:
    """A listener that keeps spans. Times are those of the events, in microseconds of their clock."""

    def __init__(self) -> None:
        self._found: list[dict[str, Any]] = []
        self._added: dict[int, ev.RequestAdded] = {}
        self._since: dict[int, tuple[str, float]] = {}  # by seq_id: waits or runs, from when on
        self._scheduled: dict[int, float] = {}  # by step
        self._now = self._arrived = 0.0

    def __call__(self, events: SequenceOf[ev.Event]) -> None:
        """Add the spans of what happened. Who was admitted or preempted, was so when the turn's step began."""
        self._now = max([self._now, *[event.start for event in events if isinstance(event, ev.StepBegan)]])
        for event in events:
            match event:
                case ev.Snapshot():
                    for seq in event.sequences:
                        self._add(seq.added, "running" if seq.is_running else "waiting")
                case ev.RequestAdded():
                    self._add(event, "waiting")
                case ev.Admitted(seq_id):
                    self._turn(seq_id, "running")
                case ev.Preempted(seq_id, for_seq_id):
                    self._turn(seq_id, "waiting (preempted)")
                    self._put("i", REQUESTS, seq_id, f"preempted for {self._name(for_seq_id)}", self._now, s="t")
                case ev.PrefixHit(seq_id, num_tokens):
                    self._put("i", REQUESTS, seq_id, f"{num_tokens} tokens cached", self._now, s="t")
                case ev.StepBegan(step, start, scheduled, output, budget_left):
                    self._scheduled[step] = scheduled
                    tokens = {"tokens": output.num_tokens, "budget left": budget_left}
                    self._span(ENGINE, SCHEDULE, f"step {step}", start, scheduled, **tokens)
                    self._now = max(self._now, scheduled)
                case ev.StepEnded():
                    self._end(event)
                case ev.Finished(seq_id) | ev.Aborted(seq_id):
                    self._turn(seq_id, None)

    def events(self) -> list[dict[str, Any]]:
        """The trace; what still runs ends with the last step."""
        for seq_id, (state, _) in list(self._since.items()):
            self._turn(seq_id, state)
        names = [("process_name", ENGINE, 0, "engine"), ("process_name", REQUESTS, 0, "requests")]
        names += [("thread_name", ENGINE, track, name) for track, name in TRACKS.items()]
        names += [("thread_name", REQUESTS, seq_id, self._name(seq_id)) for seq_id in self._added]
        meta = [{"ph": "M", "name": k, "pid": pid, "tid": tid, "args": {"name": name}} for k, pid, tid, name in names]
        return [*meta, *self._found]

    def _put(self, kind: str, process: int, track: int, name: str, at: float, **more: Any) -> None:
        event = {"ph": kind, "pid": process, "tid": track, "name": name, "ts": round(at * 1e6, 1)}
        self._found.append(event | more)

    def _span(self, process: int, track: int, name: str, start: float, end: float, **args: int) -> None:
        self._put("X", process, track, name, start, dur=round(max(0.0, end - start) * 1e6, 1), args=args)

    def _add(self, added: ev.RequestAdded, state: str) -> None:
        self._now = max(self._now, added.time)
        self._added[added.seq_id] = added
        self._since[added.seq_id] = (state, added.time)

    def _end(self, event: ev.StepEnded) -> None:
        start = max(event.start, self._arrived, self._scheduled.pop(event.step, event.start))
        self._arrived = event.arrived
        for scheduled in event.output.scheduled_seqs:
            if (added := self._added.get(scheduled.seq_id)) is not None:
                num_drafts = max(0, scheduled.num_samples - 1)
                name = f"verify {num_drafts}" if num_drafts else "decode"
                if scheduled.num_new_tokens > 1 + num_drafts or scheduled.start < len(added.prompt_token_ids):
                    name = f"prefill {scheduled.num_new_tokens}"
                self._span(REQUESTS, scheduled.seq_id, name, start, event.arrived)
        step, sequences = f"step {event.step}", len(event.output.scheduled_seqs)
        self._span(ENGINE, DEVICE, step, start, event.arrived, sequences=sequences)
        self._span(ENGINE, POSTPROCESS, step, event.arrived, event.end)
        for name, value in (("KV blocks used", event.kv_blocks_used), ("waiting", event.waiting)):
            self._put("C", ENGINE, 0, name, event.end, args={name: value})
        self._now = max(self._now, event.end)

    def _turn(self, seq_id: int, state: str | None) -> None:
        """A sequence waits or runs from now on, or is gone."""
        if (entry := self._since.pop(seq_id, None)) is not None:
            self._span(REQUESTS, seq_id, *entry, self._now)
        if state is not None:
            self._since[seq_id] = (state, self._now)

    def _name(self, seq_id: int) -> str:
        added = self._added.get(seq_id)
        return f"#{seq_id}" if added is None else f"{added.request_id}{f'.{added.answer}' if added.answer else ''}"


@contextmanager
def tracing(engine: LLMEngine, path: str | Path) -> Iterator[Trace]:
    """Trace an engine for as long as the block runs. Raises ValueError if the file cannot be written."""
    trace = Trace()
    engine.subscribe(trace)
    try:
        yield trace
    finally:
        engine.unsubscribe(trace)
        write_whole(Path(path), msgspec.json.encode({"traceEvents": trace.events(), "displayTimeUnit": "ms"}))
