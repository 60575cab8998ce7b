"""Who holds which block, and how full it is: a listener that turns events into the state behind them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from folovllm import events as ev


@dataclass(slots=True)
class Cell:
    """A block. One that is free and has a hash is cached: nobody holds it, and it can still be found."""

    ref_count: int = 0
    is_free: bool = True
    hash: int | None = None
    serial: int = 0
    parent: int = 0  # the serial of the block before it


@dataclass(slots=True)
class Watched:
    """A sequence that is being served."""

    added: ev.RequestAdded
    is_running: bool = False
    num_tokens: int = 0
    num_computed_tokens: int = 0  # computed or scheduled to be
    block_table: list[int] = field(default_factory=list)
    refused: ev.Budget | None = None  # why it still waits, if it was asked

    @property
    def request_id(self) -> str:
        """Whose answer it is."""
        return self.added.request_id


class Watcher:
    """A reducer: after each step `cells` and `sequences` say what the cache manager and the scheduler would.

    It asks nobody, and so it shows what wrong code does too: a block that is free and held, or neither.
    """

    def __init__(self) -> None:
        self.block_size = 0
        self.cells: list[Cell] = []  # [N]
        self.sequences: dict[int, Watched] = {}  # by seq_id
        self._reducers: dict[type, Callable[[Any], None]] = {
            ev.Snapshot: self._snapshot,
            ev.RequestAdded: self._added,
            ev.Refused: self._refused,
            ev.Admitted: self._admitted,
            ev.Preempted: self._preempted,
            ev.Finished: self._gone,
            ev.Aborted: self._gone,
            ev.StepBegan: self._step_began,
            ev.StepEnded: self._step_ended,
            ev.BlockClaimed: self._claimed,
            ev.BlockFreed: self._freed,
            ev.BlockTaken: self._taken,
            ev.BlockAdopted: self._adopted,
            ev.BlockCached: self._published,
            ev.BlockEvicted: self._evicted,
            ev.BlockPassed: self._passed,
            ev.TableFreed: self._table_freed,
            ev.TableCut: self._table_cut,
            ev.DraftsVerified: self._verified,
        }

    def __call__(self, events: SequenceOf[ev.Event]) -> None:
        """Take in what happened."""
        for event in events:
            if (reduce := self._reducers.get(type(event))) is not None:
                reduce(event)

    def holders(self) -> list[list[tuple[Watched, int]]]:
        """Who holds each block, [N]: pairs of a running sequence and how many of its tokens lie there (0 to B).

        Several entries are a prefix that sequences share.
        """
        size = self.block_size
        held: list[list[tuple[Watched, int]]] = [[] for _ in self.cells]
        for seq in self.sequences.values():
            for i, block_id in enumerate(seq.block_table if seq.is_running else ()):
                if block_id >= 0:  # else it lies behind the window
                    held[block_id].append((seq, max(0, min(size, seq.num_computed_tokens - i * size))))
        return held

    def _snapshot(self, event: ev.Snapshot) -> None:
        self.block_size = event.block_size
        self.cells = [Cell() for _ in range(event.num_blocks)]
        for block in event.blocks:
            self.cells[block.block_id] = Cell(block.ref_count, block.is_free, block.hash, block.serial, block.parent)
        self.sequences = {
            seq.added.seq_id: Watched(
                seq.added, seq.is_running, seq.num_tokens, seq.num_computed_tokens, list(seq.block_table)
            )
            for seq in event.sequences
        }

    def _added(self, event: ev.RequestAdded) -> None:
        self.sequences[event.seq_id] = Watched(event, num_tokens=len(event.prompt_token_ids))

    def _refused(self, event: ev.Refused) -> None:
        self.sequences[event.seq_id].refused = event.budget

    def _admitted(self, event: ev.Admitted) -> None:
        seq = self.sequences[event.seq_id]
        seq.is_running, seq.num_computed_tokens, seq.refused = True, event.num_cached_tokens, None

    def _preempted(self, event: ev.Preempted) -> None:
        seq = self.sequences[event.seq_id]
        seq.is_running, seq.num_computed_tokens = False, 0

    def _gone(self, event: ev.Finished | ev.Aborted) -> None:
        del self.sequences[event.seq_id]

    def _step_began(self, event: ev.StepBegan) -> None:
        for scheduled in event.output.scheduled_seqs:
            if (seq := self.sequences.get(scheduled.seq_id)) is not None:
                seq.num_computed_tokens = scheduled.end
                seq.block_table[scheduled.first_new_block :] = scheduled.new_blocks

    def _step_ended(self, event: ev.StepEnded) -> None:
        for scheduled, token_ids in zip(event.output.scheduled_seqs, event.result.token_ids, strict=True):
            if (seq := self.sequences.get(scheduled.seq_id)) is not None:  # else it ended while the step was under way
                seq.num_tokens += len(token_ids)

    def _claimed(self, event: ev.BlockClaimed) -> None:
        self.cells[event.block_id].is_free = False

    def _freed(self, event: ev.BlockFreed) -> None:
        self.cells[event.block_id].is_free = True

    def _taken(self, event: ev.BlockTaken) -> None:
        self.cells[event.block_id].ref_count = 1

    def _adopted(self, event: ev.BlockAdopted) -> None:
        self.cells[event.block_id].ref_count = event.ref_count

    def _published(self, event: ev.BlockCached) -> None:
        cell = self.cells[event.block_id]
        cell.hash, cell.serial, cell.parent = event.hash, event.serial, event.parent

    def _evicted(self, event: ev.BlockEvicted) -> None:
        cell = self.cells[event.block_id]
        cell.hash, cell.serial, cell.parent = None, 0, 0

    def _passed(self, event: ev.BlockPassed) -> None:
        self.cells[event.block_id].ref_count = event.ref_count
        table = self.sequences[event.seq_id].block_table
        if event.place < len(table):  # else the step that names it will say so
            table[event.place] = -1

    def _table_freed(self, event: ev.TableFreed) -> None:
        for block_id, ref_count in event.blocks:
            self.cells[block_id].ref_count = ref_count
        if (seq := self.sequences.get(event.seq_id)) is not None:
            seq.block_table.clear()

    def _table_cut(self, event: ev.TableCut) -> None:
        self.cells[event.block_id].ref_count = 0
        if (seq := self.sequences.get(event.seq_id)) is not None:
            seq.block_table.pop()

    def _verified(self, event: ev.DraftsVerified) -> None:
        if (seq := self.sequences.get(event.seq_id)) is not None:
            seq.num_computed_tokens -= event.num_draft_tokens - event.num_accepted
