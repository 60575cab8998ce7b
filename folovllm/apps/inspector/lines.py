"""Recordings: their lines, which are a header and then tagged structs, and how one is read. docs/reference/recording.md describes the format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from folovllm.engine import events as ev
from folovllm.models.messages import in_one_line

FORMAT, VERSION = "folovllm recording", 2


class Scheduled(ev.Tagged, frozen=True, tag=False):
    """What a recording keeps of a `ScheduledSequence`."""

    seq_id: int
    row: int
    start: int
    end: int
    num_samples: int
    first_new_block: int
    new_blocks: list[int]
    load_state: int = -1  # the snapshot that the step loads; -1: none
    save_state: int = -1


class StepBegan(ev.Tagged, frozen=True):
    """`events.StepBegan`, with what is kept of its sequences."""

    step: int
    start: float
    scheduled: float
    scheduled_seqs: list[Scheduled]
    budget_left: int


class StepEnded(ev.Tagged, frozen=True):
    """`events.StepEnded`, with the tokens that each sequence got."""

    step: int
    start: float
    arrived: float
    end: float
    sampled: list[tuple[int, list[int]]]  # (seq_id, token ids); without sequences that got none
    waiting: int
    kv_blocks_used: int


class DraftsVerified(ev.DraftsVerified, frozen=True):
    """`events.DraftsVerified`, with the token ids that were rejected."""

    rejected: list[int]


class Scored(ev.Tagged, frozen=True):
    """What the model said of every token before one was sampled, for a request that asked for all log-probabilities."""

    seq_id: int
    logprobs: bytes  # [V] float16, by token id


Entry = (
    ev.RequestAdded | ev.Refused | ev.Admitted | ev.PrefixHit | ev.Preempted | ev.Finished | ev.Aborted | ev.ExpertsAsked
    | ev.BlockClaimed | ev.BlockFreed | ev.BlockTaken | ev.BlockAdopted | ev.BlockCached | ev.BlockEvicted | ev.BlockPassed
    | ev.TableFreed | ev.TableCut | ev.SnapshotCached | ev.SnapshotEvicted | ev.BlocksMoved | ev.GivenUp | ev.Snapshot
    | StepBegan | StepEnded | DraftsVerified | Scored
)  # fmt: skip


class Texts(ev.Tagged, frozen=True):
    """What token ids look like, before the first line that needs them: a text each, or bytes that are no whole character."""

    texts: dict[str, str | list[int]]


class Turn(ev.Tagged, frozen=True):
    """What happened in one call of the engine's `step`, or from outside."""

    number: int
    time: float  # at which it was handed over
    events: list[Entry]


class Done(ev.Tagged, frozen=True):
    """The end."""

    num_turns: int
    time: float
    how: str


Line = Texts | Turn | Done
# numpy's numbers are those that a learner may hand in
encode_lines = msgspec.json.Encoder(enc_hook=lambda numbers: numbers.tolist()).encode_lines
_line = msgspec.json.Decoder[Line](Line)


@dataclass(slots=True, frozen=True)
class Recording:
    """A recording that was read: its header, and its other lines, which a `Watcher` can follow."""

    name: str
    header: dict[str, Any]
    lines: list[Line]

    @property
    def how(self) -> str | None:
        """How the run ended; None if the file was cut off before."""
        return next((line.how for line in self.lines[-1:] if isinstance(line, Done)), None)

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
    try:
        header = msgspec.json.decode(first, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        header = {}
    if header.get("format") != FORMAT:
        raise ValueError(f"{name} is no recording: `folovllm generate ... --record FILE` writes one")
    if (version := header.get("version")) != VERSION:
        reads = f"this reads version {VERSION}: record it anew"
        raise ValueError(f"{name} is a recording of version {version}, and {reads}")
    lines: list[Line] = []
    for number, row in enumerate(rows, 2):
        try:
            lines.append(_line.decode(row))
        except (msgspec.DecodeError, RecursionError) as error:
            if number > len(rows):  # the last line is empty, or was cut off
                break
            raise ValueError(f"{name}, line {number} is no line of a recording: {in_one_line(error)}") from error
    return Recording(name, header, lines)
