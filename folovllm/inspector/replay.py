"""From the lines of a recording back to events: a listener of engines can listen to a recording."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folovllm import events as ev
from folovllm.inspector.lines import BLOCKS, FORMAT, PLAIN, VERSION, Line
from folovllm.step.schedule import ScheduledSequence, SchedulerOutput, StepResult, no_tokens
from folovllm.watcher import Watcher

KINDS: dict[str, Any] = {name: kind for kind, name in PLAIN.items()}
BLOCK_KINDS: dict[str, Any] = {name: kind for kind, name in BLOCKS.items()}


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
    """Read a recording from its text. Raises ValueError as `read` does."""
    first, *rows = text.split("\n")
    try:
        header = json.loads(first)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{name} is no recording: `folovllm generate ... --record FILE` writes one")
    if (version := header.get("version")) != VERSION:
        raise ValueError(
            f"{name} is a recording of version {version}, and this reads version {VERSION}: record it anew"
        )
    lines = list[Line]()
    for number, row in enumerate(rows, 2):
        try:
            lines.append(json.loads(row))
        except ValueError:
            if number < len(rows) + 1:  # else it was cut off, or is nothing
                raise ValueError(f"{name}, line {number} is no JSON: the file is damaged") from None
    return Recording(name, header, lines)


class _Decoder:
    """Turns the entries of a turn into events. It keeps the state that the entries leave out."""

    def __init__(self, header: dict[str, Any]) -> None:
        self._engine = header["engine"]
        self._state = Watcher()
        self._begun: dict[int, SchedulerOutput] = {}  # by step: those in flight

    def events(self, entry: Line) -> list[ev.Event]:
        """The events of one entry."""
        events = self._decode(entry)
        self._state(events)
        return events

    def snapshot(self, state: dict[str, Any]) -> ev.Snapshot:
        """The first keyframe."""
        names = {block: (int(hash_, 16), serial, parent) for block, hash_, serial, parent in state["named"]}
        blocks = []
        for i, (ref_count, free) in enumerate(zip(state["refs"], state["free"], strict=True)):
            if ref_count or free == "0" or i in names:
                tokens = np.array(state["block_tokens"].get(str(i), []), np.int32).tobytes()
                hash_, serial, parent = names.get(i, (None, 0, 0))
                blocks.append(ev.BlockState(i, ref_count, free == "1", hash_, serial, parent, tokens))
        snapshot = ev.Snapshot(
            num_blocks=len(state["refs"]),
            block_size=self._engine["block_size"],
            max_num_seqs=self._engine["max_num_seqs"],
            max_num_batched_tokens=self._engine["max_num_batched_tokens"],
            num_steps=state["steps"],
            blocks=tuple(blocks),
            sequences=tuple(_sequence(entry, state["tokens"]) for entry in state["sequences"]),
        )
        self._state.apply(snapshot)
        return snapshot

    def _decode(self, entry: Line) -> list[ev.Event]:
        match entry:
            case ["evict", *blocks]:  # the entry leaves out the hash
                return [ev.BlockEvicted(i, self._state.cells[i].hash or 0) for i in blocks]
            case [name, *blocks] if name in BLOCK_KINDS:
                return [BLOCK_KINDS[name](i) for i in blocks]
            case [name, *fields] if name in KINDS:
                return [KINDS[name](*fields)]
            case ["new", *blocks]:
                return [kind(i) for i in blocks for kind in (ev.BlockClaimed, ev.BlockTaken)]
            case ["publish", block, seq, place, hash_, serial, parent]:
                return [ev.BlockCached(block, seq, place, int(hash_, 16), serial, parent)]
            case ["table", seq, blocks, *left]:
                return [ev.TableFreed(seq, tuple(zip(blocks, *left or [[0] * len(blocks)], strict=True)))]
            case ["guess", seq, guessed, accepted, _]:
                return [ev.DraftsVerified(seq, guessed, accepted)]
            case ["begin", step, start, ready, scheduled_seqs, left, *states]:
                own = {seq: rest for seq, *rest in states[0]} if states else {}
                scheduled = [self._scheduled(share, own) for share in scheduled_seqs]
                copies = [
                    [i, *own[s.seq_id][1:]]
                    for i, s in enumerate(scheduled)
                    if max(own.get(s.seq_id, [-1])[1:], default=-1) >= 0
                ]
                extras = {"states": np.array(copies, np.int32)} if copies else None
                output = self._begun[step] = SchedulerOutput(tuple(scheduled), extras=extras)
                return [ev.StepBegan(step, start / 1e6, ready / 1e6, output, left)]
            case ["end", step, start, arrived, end, seqs, tokens, waiting, used]:
                output, result = self._ended(step, seqs, tokens)
                return [ev.StepEnded(step, start / 1e6, arrived / 1e6, end / 1e6, output, result, waiting, used)]
            case ["experts", counts]:
                return [ev.ExpertsAsked(counts)]
            case ["add", seq, request, answer, prompt, most, priority, t]:
                return [ev.RequestAdded(seq, request, answer, prompt, most, priority, t / 1e6)]
        raise ValueError(f"unknown entry {entry}")

    def _scheduled(self, entry: int | Line, states: dict[int, list[int]]) -> ScheduledSequence:
        """One sequence's part of a step. A bare number computes one token, behind those that are computed.

        `states` has, by seq_id, what is new of the row and the snapshots of a sequence with a state.
        """
        if isinstance(entry, int):
            entry = [entry, self._state.served(entry).num_computed_tokens, 1, 1]
        seq_id, start, n, num_samples, *table = entry
        first, blocks = table or (len(self._state.served(seq_id).block_table), [])
        row = states[seq_id][0] if seq_id in states else self._state.served(seq_id).row
        return ScheduledSequence(seq_id, row, start, start + n, no_tokens(), tuple(blocks), first, num_samples, None)

    def _ended(self, step: int, seqs: list[int], tokens: list[Any]) -> tuple[SchedulerOutput, StepResult]:
        """The step that ends, and what it sampled for each of its sequences."""
        output = self._begun.pop(step, None)
        if output is None:  # it was in flight as the recording began
            output = SchedulerOutput(
                tuple(ScheduledSequence(seq, 0, 0, 0, no_tokens(), (), 0, 1, None) for seq in seqs)
            )
        sampled = {seq: [ids] if isinstance(ids, int) else ids for seq, ids in zip(seqs, tokens, strict=True)}
        return output, StepResult([sampled.get(scheduled.seq_id, []) for scheduled in output.scheduled_seqs], {})


def _sequence(entry: Line, tokens: dict[str, list[int]]) -> ev.SequenceState:
    """A sequence of a keyframe."""
    seq, request, answer, num_prompt, most, priority, t, running, num_tokens, computed, table, _ = entry
    ids = tokens[str(seq)]
    added = ev.RequestAdded(seq, request, answer, ids[:num_prompt], most, priority, t / 1e6)
    return ev.SequenceState(added, bool(running), num_tokens, computed, tuple(table), ids)
