"""What a reader of a recording knows after each line. A keyframe says all of it, so that a reader may begin there."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from folovllm import events as ev
from folovllm.step.sampling_spec import TokenIds, no_tokens

Line = list[Any]


@dataclass(slots=True)
class Served:
    """A sequence that is being served."""

    head: Line  # `head_of` its arrival
    num_tokens: int
    is_running: bool = False
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    refused: ev.Budget | None = None
    guesses: TokenIds = field(default_factory=no_tokens)  # that the step under way checks

    def entry(self) -> Line:
        """Its place in a keyframe."""
        state = [int(self.is_running), self.num_tokens, self.num_computed, self.block_table, self.refused]
        return [*self.head, *state]


class State:
    """The blocks of the pool and the sequences that are being served.

    Attributes:
        num_steps: steps that have ended.
        refs: of each block, how many tables hold it.
        free: of each block "1" if it is free, else "0".
        names: by block, those that have a name: (block, hash, serial, parent's serial).
        sequences: by seq_id.
    """

    def __init__(self, snapshot: ev.Snapshot, at: Callable[[float], int]) -> None:
        """`at` turns the clock's time into the recording's."""
        self.num_steps = snapshot.num_steps
        self.refs = [0] * snapshot.num_blocks
        self.free = bytearray(b"1" * snapshot.num_blocks)
        self.names: dict[int, tuple[int, str, int, int]] = {}
        self.sequences: dict[int, Served] = {}
        for block in snapshot.blocks:
            self.refs[block.block_id] = block.ref_count
            self.free[block.block_id] = ord("1" if block.is_free else "0")
            if block.hash is not None:
                self.names[block.block_id] = (block.block_id, f"{block.hash:016x}", block.serial, block.parent)
        for seq in snapshot.sequences:
            head, table = head_of(seq.added, at), list(seq.block_table)
            served = Served(head, seq.num_tokens, seq.is_running, seq.num_computed_tokens, table)
            self.sequences[seq.added.seq_id] = served

    def entry(self) -> dict[str, Any]:
        """What a keyframe says."""
        return {
            "steps": self.num_steps,
            "free": self.free.decode(),
            "refs": self.refs,
            "named": list(self.names.values()),
            "sequences": [seq.entry() for seq in self.sequences.values()],
        }

    def served(self, seq_id: int) -> Served:
        """A sequence; of one that is gone, a state that nobody sees."""
        return self.sequences.get(seq_id) or Served([], 0)


def head_of(event: ev.RequestAdded, at: Callable[[float], int]) -> Line:
    """What never changes of a sequence: the first seven entries of its place in a keyframe."""
    length = len(event.prompt_token_ids)
    return [
        event.seq_id, event.request_id, event.answer, length, event.max_tokens, event.priority, at(event.time),
    ]  # fmt: skip


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
