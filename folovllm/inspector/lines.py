"""From events to the lines of a recording. The format is described in docs/reference/recording.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from folovllm import events as ev
from folovllm.inspector.texts import TokenTexts
from folovllm.step.schedule import Share

FORMAT, VERSION = "folovllm recording", 1
KEY_EVERY = 256  # turns
Line = list[Any]

encode = msgspec.json.Encoder(enc_hook=lambda number: number.item()).encode  # a learner may hand in numpy's numbers


@dataclass(slots=True)
class Served:
    """A sequence that is being served."""

    head: Line  # what never changes: the first seven entries of its place in a keyframe
    num_tokens: int
    is_running: bool = False
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    refused: ev.Budget | None = None
    guesses: SequenceOf[int] = ()  # that the step under way checks

    def entry(self) -> Line:
        """Its place in a keyframe."""
        state = [int(self.is_running), self.num_tokens, self.num_computed, self.block_table, self.refused]
        return [*self.head, *state]


class LineWriter:
    """Turns one engine's events into lines, one batch of them (a turn) after the other.

    It reduces the events as it goes, as any reader of the lines will: so a share that says nothing new is one number,
    and keyframes need nobody who is asked. It never looks at an engine, and may run in a thread of its own.
    """

    def __init__(self, header: dict[str, Any], texts: TokenTexts, epoch: float, key_every: int = KEY_EVERY) -> None:
        """`header` is what `header_of` says, `epoch` the clock at time 0 of the recording. `key_every` 0: no more keyframes."""
        self.num_turns = 0
        self._header, self._texts, self._epoch, self._key_every = header, texts, epoch, key_every
        self._told: set[int] = set()  # token ids
        self._new: set[int] = set()  # and those that the line at hand needs
        self._writers: dict[type, Callable[[Any], Line | None]] = {
            ev.RequestAdded: self._added,
            ev.Refused: self._refused,
            ev.Admitted: self._admitted,
            ev.PrefixHit: lambda e: ["hit", *e],
            ev.Preempted: self._preempted,
            ev.Finished: self._finished,
            ev.Aborted: self._aborted,
            ev.ExpertsAsked: lambda e: None,  # not drawn
            ev.GivenUp: lambda e: None,  # what follows is drawn
            ev.StepBegan: self._began,
            ev.StepEnded: self._ended,
            ev.BlockClaimed: self._claimed,
            ev.BlockTaken: self._taken,
            ev.BlockFreed: self._freed,
            ev.BlockAdopted: self._adopted,
            ev.BlockPublished: self._published,
            ev.BlockEvicted: self._evicted,
            ev.BlockPassed: self._passed,
            ev.TableFreed: self._table_freed,
            ev.TableCut: self._table_cut,
            ev.GuessesChecked: self._checked,
        }

    def lines(self, events: SequenceOf[ev.Event], time: float) -> Iterator[bytes]:
        """The lines of one batch that was handed over at `time`.

        A `Snapshot` gives a header and a keyframe that has all: the beginning of the recording, or later on a beginning
        for those who join.
        """
        at = self._at(time)
        if events and isinstance(events[0], ev.Snapshot):
            yield from self._begin(events[0], at)
            events = events[1:]
            if not events:
                return
        elif self._key_every and self.num_turns % self._key_every == 0 and self.num_turns:
            yield encode(["key", self.num_turns, at, self._state()])
        self._turn: list[Line] = []
        for event in events:
            if (line := self._writers[type(event)](event)) is not None:
                self._turn.append(line)
        yield from self._new_texts()
        yield encode(["turn", self.num_turns, at, self._turn])
        self.num_turns += 1

    def done(self, how: str, time: float) -> bytes:
        """The last line."""
        return encode(["done", self.num_turns, self._at(time), how])

    def _at(self, time: float) -> int:
        return round((time - self._epoch) * 1e6)

    def _new_texts(self) -> Iterator[bytes]:
        if new := self._new - self._told:
            self._told |= new
            yield encode(["texts", self._texts.of(new)])
        self._new.clear()

    # --- the state ----------------------------------------------------------------------------------------------

    def _begin(self, snapshot: ev.Snapshot, at: int) -> Iterator[bytes]:
        """Header, all texts so far and a keyframe with all tokens."""
        self._new |= self._told
        self._told.clear()
        self._refs = [0] * snapshot.num_blocks
        self._free = bytearray(b"1" * snapshot.num_blocks)
        self._names: dict[int, tuple[int, str, int, int]] = {}
        self._num_steps = snapshot.num_steps
        for block in snapshot.blocks:
            self._refs[block.block_id] = block.ref_count
            self._free[block.block_id] = ord("1" if block.is_free else "0")
            if block.hash is not None:
                self._names[block.block_id] = (block.block_id, f"{block.hash:016x}", block.serial, block.parent)
        block_tokens, different = tokens_of(snapshot.blocks)
        self._sequences: dict[int, Served] = {}
        tokens: dict[str, list[int]] = {}
        for seq in snapshot.sequences:
            head = self._head(seq.added)
            table = list(seq.block_table)
            self._sequences[head[0]] = Served(head, seq.num_tokens, seq.is_running, seq.num_computed_tokens, table)
            tokens[str(head[0])] = list(seq.token_ids)
        self._new.update(different, *tokens.values())
        yield encode(self._header)
        yield from self._new_texts()
        yield encode(["key", self.num_turns, at, self._state() | {"tokens": tokens, "block_tokens": block_tokens}])

    def _state(self) -> dict[str, Any]:
        return {
            "steps": self._num_steps,
            "free": self._free.decode(),
            "refs": self._refs,
            "named": list(self._names.values()),
            "sequences": [seq.entry() for seq in self._sequences.values()],
        }

    def _head(self, event: ev.RequestAdded) -> Line:
        length, at = len(event.prompt_token_ids), self._at(event.time)
        return [event.seq_id, event.request_id, event.answer, length, event.max_tokens, event.priority, at]

    def _served(self, seq_id: int) -> Served:
        """Its state; of one that is gone, a state that nobody sees."""
        return self._sequences.get(seq_id) or Served([], 0)

    # --- events: what each does to the state, and its line ------------------------------------------------------

    def _added(self, event: ev.RequestAdded) -> Line:
        prompt = list(event.prompt_token_ids)
        self._new.update(prompt)
        head = self._head(event)
        self._sequences[event.seq_id] = Served(head, len(prompt))
        return ["add", *head[:3], prompt, *head[4:]]

    def _refused(self, event: ev.Refused) -> Line:
        self._served(event.seq_id).refused = event.budget
        return ["refuse", *event]

    def _admitted(self, event: ev.Admitted) -> Line:
        seq = self._served(event.seq_id)
        seq.is_running, seq.num_computed, seq.refused = True, event.num_cached_tokens, None
        return ["admit", *event]

    def _preempted(self, event: ev.Preempted) -> Line:
        seq = self._served(event.seq_id)
        seq.is_running, seq.num_computed = False, 0
        return ["preempt", *event]

    def _finished(self, event: ev.Finished) -> Line:
        self._sequences.pop(event.seq_id, None)
        return ["finish", *event]

    def _aborted(self, event: ev.Aborted) -> Line:
        self._sequences.pop(event.seq_id, None)
        return ["abort", event.seq_id]

    def _began(self, event: ev.StepBegan) -> Line:
        times = self._at(event.start), self._at(event.scheduled)
        return ["begin", event.step, *times, self._shares(event.output.shares), event.budget_left]

    def _shares(self, shares: Iterable[Share]) -> list[int | Line]:
        """A number for a share that says nothing new, a line for others. Hundreds a step come here, so it is one loop."""
        entries: list[int | Line] = []
        for seq_id, _, start, n, token_ids, blocks, first, draws, _, _ in shares:
            if (seq := self._sequences.get(seq_id)) is None:  # it ended while the step before was under way
                entries.append([seq_id, start, n, draws, first, blocks])
                continue
            is_next, seq.num_computed = seq.num_computed == start, start + n
            if draws > 1:
                seq.guesses = token_ids[1 - draws :].tolist()
            if blocks or first < len(seq.block_table):
                entries.append([seq_id, start, n, draws, first, blocks])
                seq.block_table[first:] = blocks
            else:
                entries.append(seq_id if is_next and n == 1 == draws else [seq_id, start, n, draws])
        return entries

    def _ended(self, event: ev.StepEnded) -> Line:
        seqs: list[int] = []
        tokens: list[int | list[int]] = []
        for share, ids in zip(event.output.shares, event.result.token_ids, strict=True):
            if not ids:
                continue
            seqs.append(share.seq_id)
            tokens.append(ids[0] if len(ids) == 1 else ids)
            self._new.update(ids)
            if (seq := self._sequences.get(share.seq_id)) is not None:
                seq.num_tokens += len(ids)
        self._num_steps += 1
        times = self._at(event.start), self._at(event.arrived), self._at(event.end)
        return ["end", event.step, *times, seqs, tokens, event.waiting, event.kv_blocks_used]

    def _claimed(self, event: ev.BlockClaimed) -> Line | None:
        self._free[event.block_id] = ord("0")
        return self._join("claim", event.block_id)

    def _taken(self, event: ev.BlockTaken) -> Line | None:
        block_id = event.block_id
        self._refs[block_id] = 1
        last = self._turn[-1] if self._turn else [None]
        if last[0] != "claim" or last[-1] != block_id:
            return self._join("take", block_id)
        last.pop()  # claimed just now, as always: one event says both
        if len(last) == 1:
            self._turn.pop()
        return self._join("new", block_id)

    def _freed(self, event: ev.BlockFreed) -> Line | None:
        self._free[event.block_id] = ord("1")
        return self._join("free", event.block_id)

    def _adopted(self, event: ev.BlockAdopted) -> Line:
        self._refs[event.block_id] = event.ref_count
        return ["adopt", *event]

    def _published(self, event: ev.BlockPublished) -> Line:
        block_id, seq_id, place, hash_, serial, parent = event
        name = self._names[block_id] = (block_id, f"{hash_:016x}", serial, parent)
        return ["publish", block_id, seq_id, place, *name[1:]]

    def _evicted(self, event: ev.BlockEvicted) -> Line | None:
        self._names.pop(event.block_id, None)
        return self._join("evict", event.block_id)

    def _passed(self, event: ev.BlockPassed) -> Line:
        self._refs[event.block_id] = event.ref_count
        table = self._served(event.seq_id).block_table
        if event.place < len(table):
            table[event.place] = -1
        return ["pass", *event]

    def _table_freed(self, event: ev.TableFreed) -> Line:
        for block_id, ref_count in event.blocks:
            self._refs[block_id] = ref_count
        self._served(event.seq_id).block_table.clear()
        blocks, left = [list(column) for column in zip(*event.blocks, strict=True)]
        return ["table", event.seq_id, blocks, *([left] if any(left) else [])]

    def _table_cut(self, event: ev.TableCut) -> Line:
        self._refs[event.block_id] = 0
        self._served(event.seq_id).block_table.pop()
        return ["cut", *event]

    def _checked(self, event: ev.GuessesChecked) -> Line:
        seq = self._served(event.seq_id)
        seq.num_computed -= event.num_guessed - event.num_accepted
        rejected = list(seq.guesses[event.num_accepted :])
        self._new.update(rejected)
        return ["guess", *event, rejected]

    def _join(self, name: str, block_id: int) -> Line | None:
        """Add a block to the line before, if that is of the same name; else a line of its own."""
        if self._turn and self._turn[-1][0] == name:
            self._turn[-1].append(block_id)
            return None
        return [name, block_id]


def tokens_of(blocks: SequenceOf[ev.BlockState]) -> tuple[dict[str, list[int]], list[int]]:
    """The tokens of each block that has a name, and all different ones. There may be a million: no loop over tokens."""
    named = [block for block in blocks if block.hash is not None]
    ids = np.frombuffer(b"".join([block.token_ids for block in named]), np.int32)
    numbers, found, start = ids.tolist(), dict[str, list[int]](), 0
    for block in named:
        end = start + len(block.token_ids) // ids.itemsize
        found[str(block.block_id)] = numbers[start:end]
        start = end
    is_there = np.zeros(ids.max(initial=-1) + 1, bool)  # to sort a million takes 50 times as long
    is_there[ids] = True
    return found, np.flatnonzero(is_there).tolist()


def as_file(lines: Iterable[bytes]) -> bytes:
    """Lines as they stand in a file."""
    return b"".join(line + b"\n" for line in lines)
