"""The state behind the events: who holds which block, how full it is, and who is served.

`--show-steps`, the recorder and the reader of recordings all keep this state. `docs/reference/recording.md` says it in words.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from folovllm.apps.inspector import lines
from folovllm.engine import events as ev


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
    refused: ev.Budget | None = None  # the last budget that refused it, while it waits
    row: int = -1  # its place in the batch while it runs; -1: not known

    @property
    def request_id(self) -> str:
        """Whose answer it is."""
        return self.added.request_id


NOBODY = ev.RequestAdded(-1, "", 0, (), 0, 0, 0.0)


class Watcher:
    """A reducer: after each step `cells` and `sequences` say what the cache manager and the scheduler would.

    It never asks the engine, so it shows what wrong code does, too: a block that is free and held, or neither. An event that
    names a sequence that is gone, or never came, changes nothing of that sequence.
    """

    def __init__(self) -> None:
        self.block_size = 0
        self.num_steps = 0  # that have ended
        self.cells: list[Cell] = []  # [N]
        self.sequences: dict[int, Watched] = {}  # by seq_id

    def __call__(self, events: SequenceOf[ev.Event | lines.Entry]) -> None:
        """Apply all events."""
        for event in events:
            self.apply(event)

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

    def served(self, seq_id: int) -> Watched:
        """A sequence; of one that is gone, a state that nobody sees."""
        return self.sequences.get(seq_id) or Watched(NOBODY)

    def apply(self, event: ev.Event | lines.Entry) -> None:
        """Change the state as the event says."""
        cells = self.cells
        match event:
            case ev.StepBegan() | lines.StepBegan():
                for scheduled in event.scheduled_seqs:
                    seq = self.served(scheduled.seq_id)  # it may have ended while the step before was in flight
                    seq.num_computed_tokens, seq.row = scheduled.end, scheduled.row
                    if scheduled.new_blocks or scheduled.first_new_block < len(seq.block_table):
                        seq.block_table[scheduled.first_new_block :] = scheduled.new_blocks
            case ev.StepEnded() | lines.StepEnded():
                self.num_steps += 1
                for seq_id, token_ids in event.sampled:
                    self.served(seq_id).num_tokens += len(token_ids)
            case ev.BlockClaimed(block_id):
                cells[block_id].is_free = False
            case ev.BlockFreed(block_id):
                cells[block_id].is_free = True
            case ev.BlockTaken(block_id):
                cells[block_id].ref_count = 1
            case ev.BlockAdopted():
                cells[event.block_id].ref_count = event.ref_count
            case ev.BlockCached():
                cell = cells[event.block_id]
                cell.hash, cell.serial, cell.parent = event.hash, event.serial, event.parent
            case ev.BlockEvicted():
                cell = cells[event.block_id]
                cell.hash, cell.serial, cell.parent = None, 0, 0
            case ev.BlockPassed():
                cells[event.block_id].ref_count = event.ref_count
                table = self.served(event.seq_id).block_table
                if event.place < len(table):  # else the step that schedules the sequence says it
                    table[event.place] = -1
            case ev.TableFreed():
                for block_id, ref_count in event.blocks:
                    cells[block_id].ref_count = ref_count
                self.served(event.seq_id).block_table.clear()
            case ev.TableCut():
                cells[event.block_id].ref_count = 0
                del self.served(event.seq_id).block_table[-1:]
            case ev.DraftsVerified():
                self.served(event.seq_id).num_computed_tokens -= event.num_draft_tokens - event.num_accepted
            case ev.RequestAdded():
                self.sequences[event.seq_id] = Watched(event, num_tokens=len(event.prompt_token_ids))
            case ev.Refused(seq_id, budget):
                self.served(seq_id).refused = budget
            case ev.Admitted(seq_id, num_cached_tokens):
                seq = self.served(seq_id)
                seq.is_running, seq.num_computed_tokens, seq.refused = True, num_cached_tokens, None
            case ev.Preempted(seq_id):
                seq = self.served(seq_id)
                seq.is_running, seq.num_computed_tokens, seq.row = False, 0, -1
            case ev.Finished(seq_id) | ev.Aborted(seq_id):
                self.sequences.pop(seq_id, None)
            case ev.Snapshot():
                self._begin(event)

    def _begin(self, snapshot: ev.Snapshot) -> None:
        """Take the whole state from a snapshot."""
        self.block_size, self.num_steps = snapshot.block_size, snapshot.num_steps
        known = {b.block_id: Cell(b.ref_count, b.is_free, b.hash, b.serial, b.parent) for b in snapshot.blocks}
        self.cells = [known.get(i) or Cell() for i in range(snapshot.num_blocks)]
        self.sequences = {
            seq.added.seq_id: Watched(
                seq.added, seq.is_running, seq.num_tokens, seq.num_computed_tokens, list(seq.block_table)
            )
            for seq in snapshot.sequences
        }
