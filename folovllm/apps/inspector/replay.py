"""Reads recordings. Their lines hold events as the engine's listeners get them, so a `Watcher` can follow them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from folovllm.apps.inspector.lines import FORMAT, VERSION, Done, Entry, Line, StepBegan, Turn
from folovllm.engine import events as ev
from folovllm.models.messages import in_one_line

Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
DAMAGED = (msgspec.DecodeError, RecursionError, UnicodeEncodeError)


class Engine(msgspec.Struct):
    """What a reader must know of the engine."""

    num_kv_blocks: Size
    block_size: Size


_line = msgspec.json.Decoder[Line](Line)


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

    def turns(self) -> list[Turn]:
        """What happened, turn by turn. The first turn has a `Snapshot` alone."""
        return [line for line in self.lines if isinstance(line, Turn)]


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
    lines: list[Line] = []
    has_begun = False
    for number, row in enumerate(rows, 2):
        where = f"{name}, line {number}"
        try:
            line = _line.decode(row)
        except msgspec.ValidationError as error:
            raise ValueError(f"{where} is no line of a recording: {in_one_line(error)}") from error
        except DAMAGED:
            if number > len(rows):  # the last line is empty, or was cut off
                break
            raise ValueError(f"{where} is no JSON: the file is damaged") from None
        if isinstance(line, Turn):
            if not has_begun and not isinstance(line.events[0] if line.events else None, ev.Snapshot):
                raise ValueError(f"{where} does not begin with a snapshot: the file is damaged")
            has_begun = True
            _require_blocks(line.events, header["engine"]["num_kv_blocks"], where)
        lines.append(line)
    return Recording(name, header, lines)


def _require_blocks(entries: list[Entry], num_blocks: int, where: str) -> None:
    """Raise ValueError for a block that the engine does not have; -1 in a table lies behind the window."""
    named: list[int] = []
    for entry in entries:
        match entry:
            case ev.TableFreed():
                named += [block_id for block_id, _ in entry.blocks]
            case ev.Snapshot():
                named += [entry.num_blocks] * (entry.num_blocks != num_blocks) + [
                    block.block_id for block in entry.blocks
                ]
                named += [block_id for seq in entry.sequences for block_id in seq.block_table if block_id >= 0]
            case StepBegan():
                named += [block_id for each in entry.scheduled_seqs for block_id in each.new_blocks if block_id >= 0]
            case _:
                named += [entry.block_id] if hasattr(entry, "block_id") else []
    if wrong := [block_id for block_id in named if not 0 <= block_id < num_blocks]:
        raise ValueError(f"{where}: block {min(wrong)} of {num_blocks} does not exist")


def _checked_header(first: str, name: str) -> dict[str, Any]:
    try:
        header = msgspec.json.decode(first, type=dict[str, Any])
    except DAMAGED:
        header = {}
    if header.get("format") != FORMAT:
        raise ValueError(f"{name} is no recording: `folovllm generate ... --record FILE` writes one")
    if (version := header.get("version")) != VERSION:
        raise ValueError(
            f"{name} is a recording of version {version}, and this reads version {VERSION}: record it anew"
        )
    try:
        msgspec.convert(header.get("engine"), Engine)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name} does not describe its engine in its first line: {in_one_line(error)}") from error
    return header
