"""Reads recordings. Their lines hold events as the engine's listeners get them, so a `Watcher` can follow them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from folovllm.apps.inspector.lines import FORMAT, VERSION, Done, Line, Turn
from folovllm.models.messages import in_one_line

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
    header, lines = _checked_header(first, name), list[Line]()
    for number, row in enumerate(rows, 2):
        try:
            lines.append(_line.decode(row))
        except (msgspec.DecodeError, RecursionError) as error:
            if number > len(rows):  # the last line is empty, or was cut off
                break
            raise ValueError(f"{name}, line {number} is no line of a recording: {in_one_line(error)}") from error
    return Recording(name, header, lines)


def _checked_header(first: str, name: str) -> dict[str, Any]:
    try:
        header = msgspec.json.decode(first, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        header = {}
    if header.get("format") != FORMAT:
        raise ValueError(f"{name} is no recording: `folovllm generate ... --record FILE` writes one")
    if (version := header.get("version")) != VERSION:
        raise ValueError(
            f"{name} is a recording of version {version}, and this reads version {VERSION}: record it anew"
        )
    return header
