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
        self.cells: list[Cell] = []  # [N]
        self.sequences: dict[int, Watched] = {}  # by seq_id

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

    def _served(self, seq_id: int) -> Watched:
        """A sequence; of one that is gone, a state that nobody sees."""
        return self.sequences.get(seq_id) or Watched(NOBODY)

    def __call__(self, events: SequenceOf[ev.Event | lines.Entry]) -> None:
        """Change the state as the events say."""
        for event in events:
            self._apply(event)

    def _apply(self, event: ev.Event | lines.Entry) -> None:
        cells = self.cells
        match event:
            case ev.StepBegan() | lines.StepBegan():
                for scheduled in event.scheduled_seqs:
                    seq = self._served(scheduled.seq_id)  # it may have ended while the step before was in flight
                    seq.num_computed_tokens = scheduled.end
                    if scheduled.new_blocks or scheduled.first_new_block < len(seq.block_table):
                        seq.block_table[scheduled.first_new_block :] = scheduled.new_blocks
            case ev.StepEnded() | lines.StepEnded():
                for seq_id, token_ids in event.sampled:
                    self._served(seq_id).num_tokens += len(token_ids)
            case ev.BlockClaimed(block_id):
                cells[block_id].is_free = False
            case ev.BlockFreed(block_id):
                cells[block_id].is_free = True
            case ev.BlockTaken(block_id):
                cells[block_id].ref_count = 1
            case ev.BlockAdopted(block_id, _, ref_count):
                cells[block_id].ref_count = ref_count
            case ev.BlockCached(block_id, _, _, hash_, serial, parent):
                cells[block_id].hash, cells[block_id].serial, cells[block_id].parent = hash_, serial, parent
            case ev.BlockEvicted(block_id):
                cells[block_id].hash, cells[block_id].serial, cells[block_id].parent = None, 0, 0
            case ev.BlockPassed(seq_id, place, block_id, ref_count):
                cells[block_id].ref_count = ref_count
                table = self._served(seq_id).block_table
                if place < len(table):  # else the step that schedules the sequence says it
                    table[place] = -1
            case ev.TableFreed(seq_id, blocks):
                for block_id, ref_count in blocks:
                    cells[block_id].ref_count = ref_count
                self._served(seq_id).block_table.clear()
            case ev.TableCut(seq_id, block_id):
                cells[block_id].ref_count = 0
                del self._served(seq_id).block_table[-1:]
            case ev.DraftsVerified(seq_id, num_draft_tokens, num_accepted):
                self._served(seq_id).num_computed_tokens -= num_draft_tokens - num_accepted
            case ev.RequestAdded(seq_id):
                self.sequences[seq_id] = Watched(event, num_tokens=len(event.prompt_token_ids))
            case ev.Refused(seq_id, budget):
                self._served(seq_id).refused = budget
            case ev.Admitted(seq_id, num_cached_tokens):
                seq = self._served(seq_id)
                seq.is_running, seq.num_computed_tokens, seq.refused = True, num_cached_tokens, None
            case ev.Preempted(seq_id):
                seq = self._served(seq_id)
                seq.is_running, seq.num_computed_tokens = False, 0
            case ev.Finished(seq_id) | ev.Aborted(seq_id):
                self.sequences.pop(seq_id, None)
            case ev.Snapshot():
                self._begin(event)

    def _begin(self, snapshot: ev.Snapshot) -> None:
        """Take the whole state from a snapshot."""
        self.block_size = snapshot.block_size
        self.cells = [Cell() for _ in range(snapshot.num_blocks)]
        for block in snapshot.blocks:
            self.cells[block.block_id] = Cell(*block[1:-1])
        self.sequences = {seq.added.seq_id: Watched(*seq[:4], list(seq.block_table)) for seq in snapshot.sequences}
