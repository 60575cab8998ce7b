"""The contiguous KV cache: a block of `max_model_len` slots for every sequence, used or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from folovllm.cache.manager import KVCacheManager
from folovllm.engine.event_stream import Events
from folovllm.engine.events import BlockClaimed, BlockFreed, BlockState, BlockTaken, TableFreed
from folovllm.request import Sequence


class FreeSlots(list[int]):
    """The blocks that no sequence holds: a list that reports what is taken and given back."""

    def __init__(self, block_ids: Iterable[int], events: Events) -> None:
        super().__init__(block_ids)
        self._events = events

    def pop(self, index: SupportsIndex = -1) -> int:
        """Take a block and return its id."""
        block_id = super().pop(index)
        if self._events.on:
            self._events.emit(BlockClaimed(block_id))
            self._events.emit(BlockTaken(block_id))
        return block_id

    def extend(self, block_ids: Iterable[int]) -> None:
        """Give blocks back."""
        for block_id in block_ids:
            self.append(block_id)
            if self._events.on:
                self._events.emit(BlockFreed(block_id))


class SlotManager(KVCacheManager):
    """Gives each sequence one block, long enough for any; so `num_blocks` bounds the batch.

    Simple, and wasteful: a sequence of 10 tokens holds as much memory as one of `max_model_len`.
    """

    def __init__(self, num_blocks: int, block_size: int, events: Events | None = None) -> None:
        super().__init__(num_blocks, block_size, events)
        self._free = FreeSlots(reversed(range(num_blocks)), self.events)  # the end is the next one to go

    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Give `seq` a block if it has none: its id is appended to `seq.block_table`, to the list that is there.

        A sequence that has its block has room for all tokens it will ever have: True, and nothing changes. Else a free
        block is taken from the end of `self._free`; False, with nothing changed, if there is none.
        """
        if not seq.block_table:
            if not self._free:
                return False
            seq.block_table.append(self._free.pop())
        return True

    def free(self, seq: Sequence) -> None:
        self._free.extend(seq.block_table)
        if self.events.on and seq.block_table:
            self.events.emit(TableFreed(seq.seq_id, tuple((i, 0) for i in seq.block_table)))
        seq.block_table.clear()

    def block_states(self) -> Iterable[BlockState]:
        return (BlockState(i, 1, False) for i in sorted({*range(self.num_blocks)} - {*self._free}))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @staticmethod
    def slots(block_table: list[int], block_size: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """Where tokens `start` to `end - 1` go: a run of consecutive slots in the sequence's one block, [end - start]."""
        first = block_table[0] * block_size
        return np.arange(first + start, first + end)
