"""A block manager of plain arrays, whose watermark follows the load: two free blocks for each sequence that runs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from folovllm.cache.manager import KVCacheManager
from folovllm.engine.event_stream import Events
from folovllm.request import Sequence, SequenceStatus

GROWTH = 2  # blocks by which a sequence may grow before the next one gives up its own


class BlockManager(KVCacheManager):
    """Free blocks are a stack in an array.

    Invariants: `_stack[: num_free]` names the free blocks, each once; every other block is in one table; `_holders` are
    the sequences that hold blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, events: Events | None = None) -> None:
        super().__init__(num_blocks, block_size, events)
        self._stack = np.arange(num_blocks)
        self._num_free = num_blocks
        self._holders: set[int] = set()  # by seq_id

    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Blocks for the next tokens. An admission leaves `GROWTH` blocks for each of those that run already."""
        needed = -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
        missing = max(0, needed - len(seq.block_table))
        spare = GROWTH * len(self._holders - {seq.seq_id}) if seq.status is SequenceStatus.WAITING else 0
        if missing + spare > self._num_free:
            return False
        start, end = self._num_free - missing, self._num_free
        seq.block_table.extend(self._stack[start:end].tolist())
        self._num_free = start
        self._holders.add(seq.seq_id)
        return True

    def free(self, seq: Sequence) -> None:
        """Put the blocks back on the stack."""
        start, end = self._num_free, self._num_free + len(seq.block_table)
        self._stack[start:end] = seq.block_table
        self._num_free = end
        self._holders.discard(seq.seq_id)
        seq.block_table.clear()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._num_free

    @staticmethod
    def slots(block_table: list[int], block_size: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """Block * block_size + offset for each token, [end - start]."""
        block, offset = np.divmod(np.arange(start, end), block_size)
        return np.asarray(block_table, np.int64)[block] * block_size + offset
