"""From the lines of a recording back to events: a listener of engines can listen to a recording."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folovllm import events as ev
from folovllm.inspector.keyframe import Line
from folovllm.inspector.lines import FORMAT, VERSION
from folovllm.step.sampling_spec import no_tokens
from folovllm.step.schedule import ScheduledSequence, SchedulerOutput, StepResult


class Turn(NamedTuple):
    """What happened in one turn. Turn -1 is the `Snapshot` with which a recording begins."""

    number: int
    time: float  # seconds since the recording began
    events: list[ev.Event]
    key: dict[str, Any] | None  # how things stood before it, where there is a keyframe


@dataclass(slots=True, frozen=True)
class Recording:
    """A recording that was read: its header, and its other lines as they stand."""

    name: str
    header: dict[str, Any]
    lines: list[Line]

    @property
    def how(self) -> str | None:
        """How the run ended; None if the file was cut off before."""
        return self.lines[-1][3] if self.lines and self.lines[-1][0] == "done" else None

    def turns(self) -> Iterator[Turn]:
        """All of it, turn by turn. Raises ValueError where a line is not what the format says."""
        decode, key = _Decoder(self.header), None
        for number, line in enumerate(self.lines, 2):
            try:
                match line:
                    case ["key", _, t, {"tokens": _} as state]:
                        yield Turn(-1, t / 1e6, [decode.snapshot(state)], None)
                    case ["key", _, _, state]:
                        key = state
                    case ["turn", n, t, events]:
                        yield Turn(n, t / 1e6, [event for e in events for event in decode.events(e)], key)
                        key = None
            except (KeyError, ValueError, TypeError, IndexError) as error:
                raise ValueError(
                    f"{self.name}, line {number} is no line of a recording ({type(error).__name__}: {error})"
                ) from error


def read(path: str | Path) -> Recording:
    """Read a recording, up to its last whole line.

    Raises:
        ValueError: it cannot be read, is none, or is of another version; the sentence says which.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    return parse(text, path.name)


def parse(text: str, name: str) -> Recording:
    """As `read`, of a text."""
    header, lines = check_header(text.partition("\n")[0], name), list[Line]()
    rows = text.split("\n")[1:]
    for number, row in enumerate(rows, 2):
        try:
            lines.append(json.loads(row))
        except ValueError:
            if number < len(rows) + 1:
                raise ValueError(f"{name}, line {number} is no JSON: the file is damaged") from None
    return Recording(name, header, lines)  # what stands behind the last newline was cut off, or is nothing


def check_header(line: str, name: str) -> dict[str, Any]:
    """The header. Raises ValueError unless it is one that we can read."""
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{name} is no recording: `folovllm generate ... --record FILE` writes one")
    if (version := header.get("version")) != VERSION:
        raise ValueError(
            f"{name} is a recording of version {version}, and this reads version {VERSION}: record it anew"
        )
    return header


class _Decoder:
    """Lines of a turn to events. A step's end names its scheduled sequences by the step, so those that are under way are kept."""

    def __init__(self, header: dict[str, Any]) -> None:
        self._engine = header["engine"]
        self._begun: dict[int, SchedulerOutput] = {}  # by step
        self._ends: dict[int, int] = {}  # by seq_id: tokens that are computed
        self._tables: dict[int, int] = {}  # by seq_id: entries of its block table
        self._decoders: dict[str, Callable[..., ev.Event | Iterable[ev.Event]]] = {
            "add": lambda seq, request, answer, prompt, most, priority, t: ev.RequestAdded(
                seq, request, answer, prompt, most, priority, t / 1e6
            ),
            "refuse": ev.Refused,
            "hit": ev.PrefixHit,
            "admit": self._admit,
            "preempt": self._preempt,
            "finish": ev.Finished,
            "abort": ev.Aborted,
            "new": lambda *ids: [kind(i) for i in ids for kind in (ev.BlockClaimed, ev.BlockTaken)],
            "claim": lambda *ids: map(ev.BlockClaimed, ids),
            "take": lambda *ids: map(ev.BlockTaken, ids),
            "free": lambda *ids: map(ev.BlockFreed, ids),
            "adopt": ev.BlockAdopted,
            "publish": lambda block, seq, place, hash_, serial, parent: ev.BlockCached(
                block, seq, place, int(hash_, 16), serial, parent
            ),
            "evict": self._evict,
            "pass": ev.BlockPassed,
            "table": self._table,
            "cut": self._cut,
            "guess": self._guess,
            "begin": self._begin,
            "end": self._end,
        }
        self._names: dict[int, int] = {}  # hashes by block

    def events(self, line: Line) -> Iterable[ev.Event]:
        """The events of one entry of a turn."""
        name, *rest = line
        found = self._decoders[name](*rest)
        events: list[Any] = [found] if isinstance(found, ev.Event) else list(found)
        for event in events:
            if isinstance(event, ev.BlockCached):
                self._names[event.block_id] = event.hash
        return events

    def snapshot(self, state: dict[str, Any]) -> ev.Snapshot:
        """The first keyframe."""
        names = {block: (int(hash_, 16), serial, parent) for block, hash_, serial, parent in state["named"]}
        self._names = {block: name[0] for block, name in names.items()}
        blocks = []
        for i, (ref_count, free) in enumerate(zip(state["refs"], state["free"], strict=True)):
            if ref_count or free == "0" or i in names:
                tokens = np.array(state["block_tokens"].get(str(i), []), np.int32).tobytes()
                hash_, serial, parent = names.get(i, (None, 0, 0))
                blocks.append(ev.BlockState(i, ref_count, free == "1", hash_, serial, parent, tokens))
        return ev.Snapshot(
            num_blocks=len(state["refs"]),
            block_size=self._engine["block_size"],
            max_num_seqs=self._engine["max_num_seqs"],
            max_num_batched_tokens=self._engine["max_num_batched_tokens"],
            num_steps=state["steps"],
            blocks=tuple(blocks),
            sequences=tuple(self._sequence(entry, state["tokens"]) for entry in state["sequences"]),
        )

    def _sequence(self, entry: Line, tokens: dict[str, list[int]]) -> ev.SequenceState:
        seq, request, answer, num_prompt, most, priority, t, running, num_tokens, computed, table, _ = entry
        ids = tokens[str(seq)]
        self._ends[seq], self._tables[seq] = computed, len(table)
        added = ev.RequestAdded(seq, request, answer, ids[:num_prompt], most, priority, t / 1e6)
        return ev.SequenceState(added, bool(running), num_tokens, computed, tuple(table), ids)

    def _admit(self, seq: int, cached: int) -> ev.Event:
        self._ends[seq] = cached
        return ev.Admitted(seq, cached)

    def _preempt(self, seq: int, by: int, lost: int) -> ev.Event:
        self._ends[seq] = 0
        return ev.Preempted(seq, by, lost)

    def _evict(self, *ids: int) -> Iterable[ev.Event]:
        return [ev.BlockEvicted(i, self._names.pop(i, 0)) for i in ids]

    def _table(self, seq: int, blocks: list[int], left: list[int] | None = None) -> ev.Event:
        self._tables[seq] = 0
        return ev.TableFreed(seq, tuple(zip(blocks, left or [0] * len(blocks), strict=True)))

    def _cut(self, seq: int, block: int) -> ev.Event:
        self._tables[seq] -= 1
        return ev.TableCut(seq, block)

    def _guess(self, seq: int, guessed: int, accepted: int, _rejected: list[int]) -> ev.Event:
        self._ends[seq] -= guessed - accepted
        return ev.DraftsVerified(seq, guessed, accepted)

    def _begin(self, step: int, start: int, ready: int, scheduled_seqs: list[int | Line], left: int) -> ev.Event:
        output = self._begun[step] = SchedulerOutput(tuple(map(self._scheduled, scheduled_seqs)))
        return ev.StepBegan(step, start / 1e6, ready / 1e6, output, left)

    def _scheduled(self, line: int | Line) -> ScheduledSequence:
        if isinstance(line, int):
            line = [line, self._ends.get(line, 0), 1, 1]
        seq, start, n, draws, *table = line
        first, blocks = table or (self._tables.get(seq, 0), [])
        self._ends[seq], self._tables[seq] = start + n, first + len(blocks)
        return ScheduledSequence(seq, 0, start, n, no_tokens(), tuple(blocks), first, draws, None)

    def _end(
        self, step: int, start: int, arrived: int, end: int, seqs: list[int], tokens: list[Any], waiting: int, used: int
    ) -> ev.Event:
        drawn = {seq: [ids] if isinstance(ids, int) else ids for seq, ids in zip(seqs, tokens, strict=True)}
        output = self._begun.pop(step, None)
        if output is None:  # it was under way as the recording began
            output = SchedulerOutput(
                tuple(ScheduledSequence(seq, 0, 0, 0, no_tokens(), (), 0, 1, None) for seq in seqs)
            )
        result = StepResult([drawn.get(scheduled.seq_id, []) for scheduled in output.scheduled_seqs], {})
        return ev.StepEnded(step, start / 1e6, arrived / 1e6, end / 1e6, output, result, waiting, used)
