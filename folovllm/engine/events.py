"""What happens in the engine: the records that metrics, `--show-steps`, pictures and recordings read (`folovllm.engine.event_stream`).

An event is a record that can be written to a file. It names sequences and blocks by number and holds no text. Scheduler,
cache managers and the loop emit events, the body of an exercise never does: so the events of wrong code show what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Literal, NamedTuple

import msgspec

from folovllm.step.schedule import ScheduledSequence, SchedulerOutput, StepResult

Budget = Literal["sequences", "tokens", "blocks", "preemption"]  # what refused; "preemption": a sequence just gave way


class Tagged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A record that is an array on the wire and in a recording: its name, and then its fields."""


class RequestAdded(Tagged, frozen=True):  # from here to `Snapshot`: all that M1 emits
    """A sequence came: one answer to a request."""

    seq_id: int
    request_id: str
    answer: int  # which of the answers to its prompt
    prompt_token_ids: SequenceOf[int]
    max_tokens: int
    priority: int
    time: float  # seconds of a monotonic clock, as all times here


class Refused(Tagged, frozen=True):
    """The sequence that waits in front was not admitted to this step."""

    seq_id: int
    budget: Budget


class Admitted(Tagged, frozen=True):
    """A sequence was let in; so many of its tokens were in the cache already."""

    seq_id: int
    num_cached_tokens: int


class Finished(Tagged, frozen=True):
    """A sequence ended by itself: "stop" or "length"."""

    seq_id: int
    reason: str


class Aborted(Tagged, frozen=True):
    """A sequence was ended from outside, or given up."""

    seq_id: int


class StepBegan(Tagged, frozen=True):
    """A step was decided. Its scheduled sequences say what each sequence computes, and which blocks are new in its table.

    Draft tokens may be placeholder ids (`DraftTokens`); from `DraftsVerified` on they are tokens.
    """

    step: int
    start: float  # when the scheduler began
    scheduled: float  # and when it was ready
    output: SchedulerOutput
    budget_left: int  # tokens that the step could have computed besides

    @property
    def scheduled_seqs(self) -> SequenceOf[ScheduledSequence]:
        """The sequences of the step, as a recording has them, too."""
        return self.output.scheduled_seqs


class StepEnded(Tagged, frozen=True):
    """A step was taken in. Steps end in the order in which they begin."""

    step: int
    start: float  # from here on its time counts: with overlap from the end of the step before, at the earliest
    arrived: float  # its tokens were on the host
    end: float
    output: SchedulerOutput
    result: StepResult  # sequence by sequence; tokens of a sequence that has ended are dropped
    waiting: int  # sequences
    kv_blocks_used: int

    @property
    def sampled(self) -> list[tuple[int, list[int]]]:
        """The sequences that got tokens: (seq_id, token ids)."""
        pairs = zip(self.output.scheduled_seqs, self.result.token_ids, strict=True)
        return [(scheduled.seq_id, ids) for scheduled, ids in pairs if ids]


class SequenceState(NamedTuple):
    """A sequence that is being served."""

    added: RequestAdded
    is_running: bool
    num_tokens: int
    num_computed_tokens: int
    block_table: tuple[int, ...]
    token_ids: SequenceOf[int]  # [num_tokens]


class Snapshot(Tagged, frozen=True):
    """How things stand. Each listener hears it first, for itself; the events after it are changes to it."""

    num_blocks: int  # 0: the cache is no pool of blocks (M1)
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_steps: int  # taken in
    blocks: tuple[BlockState, ...]  # all others are blank
    sequences: tuple[SequenceState, ...]


class BlockClaimed(Tagged, frozen=True):  # from here on: blocks, or slots (M2, M3)
    """A block left the free list. `BlockTaken` says so too if it gets new contents, `BlockAdopted` if its old ones are used."""

    block_id: int


class BlockFreed(Tagged, frozen=True):
    """A block joined the free list; its contents stay until it is taken."""

    block_id: int


class BlockTaken(Tagged, frozen=True):
    """A block got a first holder, for new contents. The `ScheduledSequence` that names it says who holds it."""

    block_id: int


class TableFreed(Tagged, frozen=True):
    """A sequence gave back its blocks."""

    seq_id: int
    blocks: tuple[tuple[int, int], ...]  # (block_id, holders that are left), first block first


class Preempted(Tagged, frozen=True):
    """A sequence gave way; what it had computed is lost."""

    seq_id: int
    for_seq_id: int  # may be itself: it ranks last
    num_tokens: int  # computed by earlier steps


class BlockState(NamedTuple):
    """A block that is held or has a name."""

    block_id: int
    ref_count: int
    is_free: bool
    hash: int | None = None
    serial: int = 0
    parent: int = 0
    token_ids: bytes = b""  # int32, of one that has a name


class PrefixHit(Tagged, frozen=True):  # from here on: cached blocks (M5)
    """The prefix cache had these tokens of a sequence that was admitted."""

    seq_id: int
    num_tokens: int


class BlockAdopted(Tagged, frozen=True):
    """A sequence began with a cached block, which was free or has other holders."""

    block_id: int
    seq_id: int
    ref_count: int  # with it


class BlockCached(Tagged, frozen=True):
    """A full block got a name, so that others find it."""

    block_id: int
    seq_id: int  # whose tokens it holds,
    place: int  # and which block of them
    hash: int
    serial: int  # the number of this publication: each gets a new one (`PrefixCache`)
    parent: int  # the serial of the block before it


class BlockEvicted(Tagged, frozen=True):
    """A block lost its name."""

    block_id: int
    hash: int


class BlockPassed(Tagged, frozen=True):  # blocks behind a sliding window
    """A sequence gave back a block that lies behind its window."""

    seq_id: int
    place: int  # which block of it
    block_id: int
    ref_count: int  # holders that are left


class GivenUp(Tagged, frozen=True):  # from here on: electives; a grammar is X1's
    """The engine is about to end a sequence, whose answer cannot get its form any more. `Aborted` follows."""

    seq_id: int


class DraftsVerified(Tagged, frozen=True):  # X3
    """A step verified a draft of the next tokens of a sequence."""

    seq_id: int
    num_draft_tokens: int
    num_accepted: int  # the first so many; one token more was sampled


class TableCut(Tagged, frozen=True):
    """A sequence gave back its last block, which was reserved for draft tokens that were rejected."""

    seq_id: int
    block_id: int


class ExpertsAsked(Tagged, frozen=True):  # X4
    """How often each expert was asked by all steps so far. Said at first and before the end of each step, on request only.

    The engine waits for the device to know it. With overlap, that is for the step after this one, which counts here too.
    """

    counts: SequenceOf[SequenceOf[int]]  # [L][E]


class SnapshotCached(Tagged, frozen=True):  # X5
    """A snapshot of a sequence's state got its block, so that others find it."""

    snapshot: int  # as a recording's scheduled sequence has it (`apps/inspector/lines.py`)
    num_tokens: int  # that are in the state
    serial: int  # of the block at whose end it was taken


class SnapshotEvicted(Tagged, frozen=True):
    """A block lost its snapshot."""

    snapshot: int
    num_tokens: int


class BlocksMoved(Tagged, frozen=True):  # X7
    """K/V of blocks left the device for another memory, came back, or was lost there."""

    what: str  # "offloaded", "loaded" or "lost"
    place: str  # where to, or where from, or where it was: "host", "disk", "device", "peer"
    num_blocks: int
    num_bytes: int
    seq_id: int  # for which sequence it came; -1: for none


Event = (
    RequestAdded | Refused | Admitted | Finished | Aborted | StepBegan | StepEnded | Snapshot
    | BlockClaimed | BlockFreed | BlockTaken | TableFreed | Preempted | PrefixHit | BlockAdopted | BlockCached | BlockEvicted | BlockPassed
    | GivenUp | DraftsVerified | TableCut | ExpertsAsked | SnapshotCached | SnapshotEvicted | BlocksMoved
)  # fmt: skip
Listener = Callable[[SequenceOf[Event]], None]
