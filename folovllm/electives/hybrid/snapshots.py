"""Prefix caching for layers with states: a prefix is reused up to the last snapshot of its state.

Any full block of K/V can be shared, because it holds each token by itself. A state sums up all tokens so far, and the next token
changes it. So a sequence can begin only with a state that was copied at that moment: a *snapshot*, taken every `interval` tokens
at the end of a block. It belongs to that block, is found by its serial number, and is evicted with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

import numpy as np

from folovllm.cache.block_manager import Block
from folovllm.cache.prefix_cache import PrefixCache, PrefixCachingBlockManager
from folovllm.electives.hybrid.state_layer import NO_SNAPSHOT, STATES, num_snapshots
from folovllm.engine.event_stream import Events
from folovllm.engine.events import SnapshotCached, SnapshotEvicted
from folovllm.engine.scheduler import TokensOfStep
from folovllm.engine.setup import EngineSetup
from folovllm.request import Sequence
from folovllm.step.schedule import Extras, ScheduledSequence


@dataclass(slots=True)
class Snapshot:
    """A copy of all layers' states after the first `num_tokens` tokens of a prefix."""

    slot: int  # where it is on the device
    num_tokens: int
    last_used: int  # when it was taken or a sequence last began with it, on a clock that counts admissions
    serial: int  # of the block at whose end it was taken


def snapshot_to_evict(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Choose the snapshot that makes room for a new one: the least recently used; of several the one with fewest tokens.

    A conversation that goes on begins with its newest snapshot, and a system prompt's is used again and again: both are recent.
    All snapshots of one long prompt are equally old. Then a shorter one saves less work, and only the last one serves prompts
    that begin with the whole prompt.
    """
    return min(snapshots, key=lambda snapshot: (snapshot.last_used, snapshot.num_tokens))


class SnapshotCache:
    """Snapshots by the block at whose end they were taken.

    Serials are never reused, so a snapshot found by a block's serial belongs to exactly the prefix that ends with this block.

    Invariant: each slot is free, or is allocated for a step that is being scheduled or in flight, or holds a snapshot.
    """

    def __init__(self, num_slots: int, events: Events | None = None) -> None:
        self.clock = 0
        self._events = Events() if events is None else events
        self._free = list(reversed(range(num_slots)))
        self._by_serial: dict[int, Snapshot] = {}

    def __len__(self) -> int:
        return len(self._by_serial)

    def longest_prefix(self, blocks: list[Block]) -> tuple[list[Block], Snapshot | None]:
        """The part of a cached prefix with which a sequence can begin, and the snapshot at its end.

        That is `blocks` up to the last one that has a snapshot (`self._by_serial`); no block and None if none has. The
        snapshot counts as used now (`self.clock`).
        """
        for count in range(len(blocks), 0, -1):
            snapshot = self._by_serial.get(blocks[count - 1].serial)
            if snapshot is not None:
                snapshot.last_used = self.clock
                return blocks[:count], snapshot
        return [], None

    def allocate(self) -> int | None:
        """A slot for a new snapshot: a free one, else that of a snapshot that is evicted. None if steps in flight hold all of them."""
        if not self._free:
            if not self._by_serial:
                return None
            self.evict(snapshot_to_evict(self._by_serial.values()).serial)
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Free a slot that holds no snapshot, or none any more."""
        self._free.append(slot)

    def cache_snapshot(self, slot: int, num_tokens: int, serial: int) -> None:
        """Let others begin with the snapshot in `slot`, which was taken at the end of the block with this `serial`.

        If the block has a snapshot already, as when two sequences with one prompt run side by side, that stays and the slot is
        freed.
        """
        if serial in self._by_serial:
            self.free(slot)
        else:
            self._by_serial[serial] = Snapshot(slot, num_tokens, self.clock, serial)

    def evict(self, serial: int) -> None:
        """Evict the snapshot of a block, if it has one."""
        snapshot = self._by_serial.pop(serial, None)
        if snapshot is not None:
            self.free(snapshot.slot)
            if self._events.on:
                self._events.emit(SnapshotEvicted(snapshot.slot, snapshot.num_tokens))


class SnapshotPrefixCache(PrefixCache):
    """A prefix cache whose blocks take their snapshots with them when they are evicted."""

    def __init__(self, block_size: int, events: Events, num_snapshots: int) -> None:
        super().__init__(block_size, events)
        self.snapshots = SnapshotCache(num_snapshots, events)

    def forget(self, block: Block) -> None:
        """Evict what a block holds, and its snapshot."""
        self.snapshots.evict(block.serial)
        super().forget(block)


def with_snapshots(
    setup: EngineSetup, tokens_of_step: TokensOfStep
) -> tuple[partial[SnapshotBlockManager], TokensOfStep]:
    """What makes the cache manager of a model with states; and `tokens_of_step` for it: a step ends where a snapshot is due."""
    interval = -(-setup.config.snapshot_interval // setup.block_size) * setup.block_size  # a whole number of blocks
    make = partial(SnapshotBlockManager, num_snapshots=num_snapshots(setup), interval=interval)
    return make, align_to_snapshots(tokens_of_step, interval)


def align_to_snapshots(tokens_of_step: TokensOfStep, interval: int) -> TokensOfStep:
    """`tokens_of_step` for models with states: a step of a sequence ends where a snapshot is due, every `interval` tokens."""
    return lambda seq, budget: min(tokens_of_step(seq, budget), interval - seq.num_computed_tokens % interval)


class SnapshotBlockManager(PrefixCachingBlockManager):
    """A `PrefixCachingBlockManager` for models with states. It marks which states a step loads from snapshots and saves to them.

    A step loads snapshots before it computes and saves them afterwards, and steps run in order on the device. So a slot may
    be given to another sequence at once. But a snapshot can be found only after its step: a sequence that is admitted to the
    very same step would load what is not there yet.
    """

    def __init__(
        self, num_blocks: int, block_size: int, events: Events | None = None, *, num_snapshots: int, interval: int
    ) -> None:
        """`interval`: tokens between snapshots, a multiple of `block_size`."""
        super().__init__(num_blocks, block_size, events)
        self.interval = interval
        self.prefix_cache: SnapshotPrefixCache = SnapshotPrefixCache(block_size, self.events, num_snapshots)
        self.snapshots = self.prefix_cache.snapshots
        # By seq_id: tokens and slot of each snapshot that a scheduled step saves, until others can find it.
        self._pending: dict[int, list[tuple[int, int]]] = {}
        self._loads: dict[int, int] = {}  # by seq_id: the slot that the step which is being scheduled loads

    def step_extras(self, scheduled_seqs: SequenceOf[ScheduledSequence]) -> Extras | None:
        """Return the copies of states that a step makes, under `STATES`; None if it makes none.

        They are [n, 3] int32: index in the step, snapshot to load, snapshot to save. NO_SNAPSHOT stands for none.
        """
        copies = []
        for i, scheduled in enumerate(scheduled_seqs):
            load, save = self._loads.pop(scheduled.seq_id, NO_SNAPSHOT), NO_SNAPSHOT
            if (pending := self._pending.get(scheduled.seq_id)) and pending[-1][0] > scheduled.start:
                save = pending[-1][1]
            if max(load, save) > NO_SNAPSHOT:
                copies.append((i, load, save))
        return {STATES: np.array(copies, np.int32)} if copies else None

    def usable(self, seq: Sequence, found: list[Block]) -> list[Block]:
        """The blocks up to the last snapshot, which becomes the state of `seq`."""
        self.snapshots.clock += 1
        blocks, snapshot = self.snapshots.longest_prefix(super().usable(seq, found))
        if snapshot is not None:
            self._loads[seq.seq_id] = snapshot.slot
        return blocks

    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Allocate blocks, and a slot for a snapshot where the step reaches a border. False if there are too few blocks.

        Only with draft tokens does a step go beyond a border. Then it keeps their inputs beside the state before them, and the
        copy has both: who begins with it at the border applies the inputs up to there.
        """
        if not super().allocate_slots(seq, num_new_tokens):
            return False
        border = (seq.num_computed_tokens + num_new_tokens) // self.interval * self.interval
        if border > seq.num_computed_tokens and (slot := self.snapshots.allocate()) is not None:
            self._pending.setdefault(seq.seq_id, []).append((border, slot))
        return True

    def truncate(self, seq: Sequence) -> None:
        """Take back blocks behind the computed tokens, and the slots of snapshots in which a rejected token counts."""
        super().truncate(seq)
        pending = self._pending.get(seq.seq_id)
        while pending and pending[-1][0] > seq.num_computed_tokens:
            self.snapshots.free(pending.pop()[1])

    def cache_scheduled_blocks(self, seqs: Iterable[Sequence]) -> None:
        """Hash the blocks that the scheduled step fills; their snapshots are published by `cache_blocks`, after the step."""
        for seq in seqs:
            super().cache_blocks(seq)

    def cache_blocks(self, seq: Sequence) -> None:
        """Hash the blocks that are written, and let others find the snapshots at their ends."""
        super().cache_blocks(seq)
        pending, serials = self._pending.get(seq.seq_id), self.prefix_cache.serials(seq)
        while pending and pending[0][0] <= len(serials) * self.block_size:
            num_tokens, slot = pending.pop(0)
            serial, num_known = serials[num_tokens // self.block_size - 1], len(self.snapshots)
            self.snapshots.cache_snapshot(slot, num_tokens, serial)
            if self.events.on and len(self.snapshots) > num_known:
                self.events.emit(SnapshotCached(slot, num_tokens, serial))

    def free(self, seq: Sequence) -> None:
        """Free what `seq` holds, also the slots of snapshots that could not be found yet."""
        for _, slot in self._pending.pop(seq.seq_id, ()):
            self.snapshots.free(slot)
        self._loads.pop(seq.seq_id, None)
        super().free(seq)
