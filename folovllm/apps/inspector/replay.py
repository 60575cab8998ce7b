"""From the lines of a recording back to events: a listener of engines can listen to a recording."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from folovllm.apps.inspector.lines import (
    FORMAT,
    VERSION,
    Done,
    DraftsVerified,
    Entry,
    Line,
    Scheduled,
    StepBegan,
    StepEnded,
)
from folovllm.apps.inspector.lines import Turn as TurnLine
from folovllm.engine import events as ev
from folovllm.models.files import in_one_line
from folovllm.step.schedule import SchedulerOutput, StepResult

NO_COPY = (-1, -1)  # a sequence loads and saves no snapshot in this step

Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


class Engine(msgspec.Struct):
    """What a reader must know of the engine."""

    num_kv_blocks: Size
    block_size: Size


class Header(msgspec.Struct):
    """The first line, as far as it is checked. More fields may come."""

    format: str
    version: int
    engine: Any = None


_header, _line = msgspec.json.Decoder(Header), msgspec.json.Decoder[Line](Line)


class Turn(NamedTuple):
    """What happened in one turn. A recording begins with a turn that has a `Snapshot` alone."""

    number: int
    time: float  # seconds
    events: list[ev.Event]


@dataclass(slots=True, frozen=True)
class Recording:
    """A recording that was read: its header, and its other lines."""

    name: str
    header: dict[str, Any]
    lines: list[Line]

    @property
    def how(self) -> str | None:
        """How the run ended; None if the file was cut off before."""
        last = self.lines[-1] if self.lines else None
        return last.how if isinstance(last, Done) else None

    def turns(self) -> Iterator[Turn]:
        """All of it, turn by turn."""
        begun: dict[int, SchedulerOutput] = {}  # by step: those in flight
        for line in self.lines:
            if isinstance(line, TurnLine):
                yield Turn(line.number, line.time, [_event(entry, begun) for entry in line.events])


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
    """Read a recording from its text. Raises ValueError as `read` does."""
    first, *rows = text.split("\n")
    header = _checked_header(first, name)
    blocks = set(range(header["engine"]["num_kv_blocks"]))
    lines: list[Line] = []
    has_begun = False
    for number, row in enumerate(rows, 2):
        is_last = number == len(rows) + 1
        if is_last and not row:
            break
        try:
            lines.append(line := _line.decode(row))
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}, line {number} is no line of a recording: {in_one_line(error)}") from error
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            if not is_last:  # else it was cut off
                raise ValueError(f"{name}, line {number} is no JSON: the file is damaged") from None
        else:
            if isinstance(line, TurnLine):
                if not has_begun and not isinstance(line.events[0] if line.events else None, ev.Snapshot):
                    raise ValueError(f"{name}, line {number} does not begin with a snapshot: the file is damaged")
                has_begun = True
                if wrong := _blocks_of(line.events, len(blocks)) - blocks:
                    raise ValueError(f"{name}, line {number}: block {min(wrong)} of {len(blocks)} does not exist")
    return Recording(name, header, lines)


def _blocks_of(entries: list[Entry], num_blocks: int) -> set[int]:
    """The blocks that entries name; -1 in a table lies behind the window."""
    named: list[int] = []
    for entry in entries:
        match entry:
            case ev.TableFreed():
                named += [block_id for block_id, _ in entry.blocks]
            case ev.Snapshot():
                named += [block.block_id for block in entry.blocks]
                named += [entry.num_blocks] * (entry.num_blocks != num_blocks)
                named += [block_id for seq in entry.sequences for block_id in seq.block_table if block_id >= 0]
            case StepBegan():
                named += [block_id for each in entry.scheduled_seqs for block_id in each.new_blocks if block_id >= 0]
            case _:
                named += [block_id] if (block_id := getattr(entry, "block_id", None)) is not None else []
    return set(named)


def _checked_header(first: str, name: str) -> dict[str, Any]:
    try:
        header = _header.decode(first)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        header = None
    if header is None or header.format != FORMAT:
        raise ValueError(f"{name} is no recording: `folovllm generate ... --record FILE` writes one")
    if header.version != VERSION:
        raise ValueError(
            f"{name} is a recording of version {header.version}, and this reads version {VERSION}: record it anew"
        )
    try:
        msgspec.convert(header.engine, Engine)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name} does not describe its engine in its first line: {error}") from error
    return dict(msgspec.json.decode(first))


def _event(entry: Entry, begun: dict[int, SchedulerOutput]) -> ev.Event:
    """The event of an entry. `begun` has the steps in flight."""
    match entry:
        case StepBegan():
            begun[entry.step] = output = _output(entry.scheduled_seqs)
            return ev.StepBegan(entry.step, entry.start, entry.scheduled, output, entry.budget_left)
        case StepEnded(step, start, arrived, end, sampled, waiting, used):
            # One that is not there was in flight as the recording began.
            output = (
                begun.pop(step)
                if step in begun
                else _output([Scheduled(seq_id, 0, 0, 0, 1, 0, []) for seq_id, _ in sampled])
            )
            tokens = dict(sampled)
            result = StepResult([tokens.get(scheduled.seq_id, []) for scheduled in output.scheduled_seqs], {})
            return ev.StepEnded(step, start, arrived, end, output, result, waiting, used)
        case DraftsVerified():
            return ev.DraftsVerified(entry.seq_id, entry.num_draft_tokens, entry.num_accepted)
    return entry


def _output(scheduled_seqs: list[Any]) -> SchedulerOutput:
    """A step of what a recording keeps of its sequences: to a listener they are like the scheduler's."""
    copies = [
        (i, s.load_state, s.save_state) for i, s in enumerate(scheduled_seqs) if (s.load_state, s.save_state) != NO_COPY
    ]
    extras = {"states": np.array(copies, np.int32)} if copies else None
    return SchedulerOutput(tuple(scheduled_seqs), extras=extras)
