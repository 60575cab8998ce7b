"""From events to the lines of a recording. The format is described in docs/reference/recording.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import msgspec

from folovllm import events as ev
from folovllm.inspector.keyframe import Line, Served, State, head_of, tokens_of
from folovllm.inspector.texts import TokenTexts
from folovllm.step.schedule import ScheduledSequence

FORMAT, VERSION = "folovllm recording", 1
KEY_EVERY = 256  # turns

encode = msgspec.json.Encoder(enc_hook=lambda number: number.item()).encode  # a learner may hand in numpy's numbers


class LineWriter:
    """Turns one engine's events into lines, one batch of them (a turn) after the other.

    It keeps the same state as any reader of the lines. So an entry that says nothing new is one number, and a keyframe asks
    the engine nothing. It may run in a thread of its own.
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
            ev.BlockCached: self._published,
            ev.BlockEvicted: self._evicted,
            ev.BlockPassed: self._passed,
            ev.TableFreed: self._table_freed,
            ev.TableCut: self._table_cut,
            ev.DraftsVerified: self._verified,
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
            yield encode(["key", self.num_turns, at, self._state.entry()])
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

    def _begin(self, snapshot: ev.Snapshot, at: int) -> Iterator[bytes]:
        """Header, all texts so far and a keyframe with all tokens."""
        self._new |= self._told
        self._told.clear()
        self._state = State(snapshot, self._at)
        block_tokens, different = tokens_of(snapshot.blocks)
        tokens = {str(seq.added.seq_id): list(seq.token_ids) for seq in snapshot.sequences}
        self._new.update(different, *tokens.values())
        yield encode(self._header)
        yield from self._new_texts()
        yield encode(
            ["key", self.num_turns, at, self._state.entry() | {"tokens": tokens, "block_tokens": block_tokens}]
        )

    # --- events: what each does to the state, and its line ------------------------------------------------------

    def _added(self, event: ev.RequestAdded) -> Line:
        prompt = list(event.prompt_token_ids)
        self._new.update(prompt)
        head = head_of(event, self._at)
        self._state.sequences[event.seq_id] = Served(head, len(prompt))
        return ["add", *head[:3], prompt, *head[4:]]

    def _refused(self, event: ev.Refused) -> Line:
        self._state.served(event.seq_id).refused = event.budget
        return ["refuse", *event]

    def _admitted(self, event: ev.Admitted) -> Line:
        seq = self._state.served(event.seq_id)
        seq.is_running, seq.num_computed, seq.refused = True, event.num_cached_tokens, None
        return ["admit", *event]

    def _preempted(self, event: ev.Preempted) -> Line:
        seq = self._state.served(event.seq_id)
        seq.is_running, seq.num_computed = False, 0
        return ["preempt", *event]

    def _finished(self, event: ev.Finished) -> Line:
        self._state.sequences.pop(event.seq_id, None)
        return ["finish", *event]

    def _aborted(self, event: ev.Aborted) -> Line:
        self._state.sequences.pop(event.seq_id, None)
        return ["abort", event.seq_id]

    def _began(self, event: ev.StepBegan) -> Line:
        times = self._at(event.start), self._at(event.scheduled)
        return ["begin", event.step, *times, self._scheduled_seqs(event.output.scheduled_seqs), event.budget_left]

    def _scheduled_seqs(self, scheduled_seqs: Iterable[ScheduledSequence]) -> list[int | Line]:
        """A number for an entry that says nothing new, a line for others. Hundreds a step come here, so it is one loop."""
        entries: list[int | Line] = []
        sequences = self._state.sequences
        for seq_id, _, start, n, token_ids, blocks, first, draws, _, _ in scheduled_seqs:
            if (seq := sequences.get(seq_id)) is None:  # it ended while the step before was under way
                entries.append([seq_id, start, n, draws, first, blocks])
                continue
            is_next, seq.num_computed = seq.num_computed == start, start + n
            if draws > 1:
                seq.guesses = token_ids[1 - draws :]  # a view: of a draft's guesses the tokens come later
            if blocks or first < len(seq.block_table):
                entries.append([seq_id, start, n, draws, first, blocks])
                seq.block_table[first:] = blocks
            else:
                entries.append(seq_id if is_next and n == 1 == draws else [seq_id, start, n, draws])
        return entries

    def _ended(self, event: ev.StepEnded) -> Line:
        seqs: list[int] = []
        tokens: list[int | list[int]] = []
        sequences = self._state.sequences
        for scheduled, ids in zip(event.output.scheduled_seqs, event.result.token_ids, strict=True):
            if not ids:
                continue
            seqs.append(scheduled.seq_id)
            tokens.append(ids[0] if len(ids) == 1 else ids)
            self._new.update(ids)
            if (seq := sequences.get(scheduled.seq_id)) is not None:
                seq.num_tokens += len(ids)
        self._state.num_steps += 1
        times = self._at(event.start), self._at(event.arrived), self._at(event.end)
        return ["end", event.step, *times, seqs, tokens, event.waiting, event.kv_blocks_used]

    def _claimed(self, event: ev.BlockClaimed) -> Line | None:
        self._state.free[event.block_id] = ord("0")
        return self._join("claim", event.block_id)

    def _taken(self, event: ev.BlockTaken) -> Line | None:
        block_id = event.block_id
        self._state.refs[block_id] = 1
        last = self._turn[-1] if self._turn else [None]
        if last[0] != "claim" or last[-1] != block_id:
            return self._join("take", block_id)
        last.pop()  # claimed just now, as always: one event says both
        if len(last) == 1:
            self._turn.pop()
        return self._join("new", block_id)

    def _freed(self, event: ev.BlockFreed) -> Line | None:
        self._state.free[event.block_id] = ord("1")
        return self._join("free", event.block_id)

    def _adopted(self, event: ev.BlockAdopted) -> Line:
        self._state.refs[event.block_id] = event.ref_count
        return ["adopt", *event]

    def _published(self, event: ev.BlockCached) -> Line:
        block_id, seq_id, place, hash_, serial, parent = event
        name = self._state.names[block_id] = (block_id, f"{hash_:016x}", serial, parent)
        return ["publish", block_id, seq_id, place, *name[1:]]

    def _evicted(self, event: ev.BlockEvicted) -> Line | None:
        self._state.names.pop(event.block_id, None)
        return self._join("evict", event.block_id)

    def _passed(self, event: ev.BlockPassed) -> Line:
        self._state.refs[event.block_id] = event.ref_count
        table = self._state.served(event.seq_id).block_table
        if event.place < len(table):
            table[event.place] = -1
        return ["pass", *event]

    def _table_freed(self, event: ev.TableFreed) -> Line:
        for block_id, ref_count in event.blocks:
            self._state.refs[block_id] = ref_count
        self._state.served(event.seq_id).block_table.clear()
        blocks, left = [list(column) for column in zip(*event.blocks, strict=True)]
        return ["table", event.seq_id, blocks, *([left] if any(left) else [])]

    def _table_cut(self, event: ev.TableCut) -> Line:
        self._state.refs[event.block_id] = 0
        self._state.served(event.seq_id).block_table.pop()
        return ["cut", *event]

    def _verified(self, event: ev.DraftsVerified) -> Line:
        seq = self._state.served(event.seq_id)
        seq.num_computed -= event.num_draft_tokens - event.num_accepted
        rejected = seq.guesses[event.num_accepted :].tolist()
        self._new.update(rejected)
        return ["guess", *event, rejected]

    def _join(self, name: str, block_id: int) -> Line | None:
        """Add a block to the line before, if that is of the same name; else a line of its own."""
        if self._turn and self._turn[-1][0] == name:
            self._turn[-1].append(block_id)
            return None
        return [name, block_id]


def as_file(lines: Iterable[bytes]) -> bytes:
    """Lines as they stand in a file."""
    return b"".join(line + b"\n" for line in lines)
