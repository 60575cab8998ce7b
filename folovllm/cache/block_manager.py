"""The paged KV cache: a sequence holds just the blocks its tokens fill (PagedAttention; Kwon et al., SOSP 2023)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from folovllm.cache.manager import KVCacheManager
from folovllm.engine.event_stream import Events
from folovllm.engine.events import BlockClaimed, BlockFreed, BlockState, BlockTaken, TableCut, TableFreed
from folovllm.request import Sequence, SequenceStatus

WATERMARK = 0.01  # share of the blocks that an admission leaves free for the sequences that run already


@dataclass(slots=True, eq=False)
class Block:
    """One block of the KV cache.

    `ref_count` sequences hold it. The other fields name its contents once it is full and published for reuse (prefix
    caching), and stay until the block is taken for something else: `hash`, the bytes of its int32 `token_ids`, the
    `serial` number of the publication, and that of the block before it.
    """

    block_id: int
    ref_count: int = 0
    hash: int | None = None
    token_ids: bytes = b""
    serial: int = 0
    parent: int = 0


class FreeList:
    """The free blocks, least recently freed first: a dictionary in the order of its entries, so no operation searches."""

    def __init__(self, blocks: Iterable[Block], events: Events | None = None) -> None:
        self._events = Events() if events is None else events
        self._blocks = OrderedDict((block.block_id, block) for block in blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def append(self, block: Block) -> None:
        """Add the most recently freed block."""
        self._blocks[block.block_id] = block
        if self._events.on:
            self._events.emit(BlockFreed(block.block_id))

    def remove(self, block: Block) -> None:
        """Take a block out, wherever it is. Raises KeyError if it is not free."""
        del self._blocks[block.block_id]
        if self._events.on:
            self._events.emit(BlockClaimed(block.block_id))

    def popleft(self) -> Block:
        """Take the least recently freed block. Raises IndexError if there is none."""
        block = next(iter(self), None)
        if block is None:
            raise IndexError("no free block")
        self.remove(block)
        return block


def prepend(free: FreeList, block: Block) -> None:
    """Add a block that holds nothing of use: the next one to be taken."""
    free.append(block)
    free._blocks.move_to_end(block.block_id, last=False)


class BlockManager(KVCacheManager):
    """Hands out blocks of `block_size` tokens and counts the sequences that hold each of them.

    Invariants: a block is in the free list exactly if its `ref_count` is 0; `ref_count` is the number of block tables
    that name it; free + used = `num_blocks`.
    """

    def __init__(self, num_blocks: int, block_size: int, events: Events | None = None) -> None:
        super().__init__(num_blocks, block_size, events)
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free = FreeList(self.blocks, self.events)
        self._watermark = int(WATERMARK * num_blocks)

    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Take the blocks for the next tokens of `seq`: many when it is admitted, later one each time its last block is full."""
        if seq.status is SequenceStatus.WAITING:
            if not self.can_allocate(seq, num_new_tokens):
                return False
            self.allocate(seq, num_new_tokens)
            self.admitted(seq)
        elif self._num_missing(seq, num_new_tokens):  # most decodes lack none
            if not self.can_append(seq, num_new_tokens):
                return False
            self.may_append(seq, num_new_tokens)
        return True

    def admitted(self, seq: Sequence) -> None:
        """Count an admission. Nothing, unless prefixes are cached."""

    def can_allocate(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Whether a waiting sequence can be admitted, with the watermark left over if others hold blocks."""
        others_hold_blocks = self.num_blocks - len(self._free) > len(seq.block_table)
        spare = self._watermark if others_hold_blocks else 0
        return self._num_missing(seq, num_new_tokens) + spare <= len(self._free)

    def allocate(self, seq: Sequence, num_new_tokens: int) -> None:
        """Admit `seq`: extend its block table to cover `seq.num_computed_tokens + num_new_tokens` tokens.

        Each block comes from the left of the free list (`_take`), and its id goes to the end of `seq.block_table`. The
        last block may be filled in part. There is room: `can_allocate` was asked.
        """
        for _ in range(self._num_missing(seq, num_new_tokens)):
            seq.block_table.append(self._take())

    def can_append(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Whether a running sequence can grow by `num_new_tokens`, down to the last free block."""
        return self._num_missing(seq, num_new_tokens) <= len(self._free)

    def may_append(self, seq: Sequence, num_new_tokens: int) -> None:
        """Let a running sequence grow: take a block only when its last one is full.

        After it, the table covers `seq.num_computed_tokens + num_new_tokens` tokens exactly: as many blocks as those
        tokens need and no more. While decoding, that is one new block every `block_size` steps. There is room:
        `can_append` was asked.
        """
        needed = -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
        while len(seq.block_table) < needed:
            seq.block_table.append(self._take())

    def deallocate(self, seq: Sequence) -> None:
        """Give back the blocks of `seq`, last block first, and clear its table.

        A block whose `ref_count` falls to 0 goes to the right end of the free list (`self._free.append(block)`); a block
        that another sequence holds too stays in use. Last block first, so that the tail of a sequence is reused before
        its beginning, which other sequences are more likely to share.
        """
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)
        seq.block_table.clear()

    def free(self, seq: Sequence) -> None:
        table = tuple(seq.block_table) if self.events.on else ()
        self.deallocate(seq)
        if table:
            self.events.emit(TableFreed(seq.seq_id, tuple((i, self.blocks[i].ref_count) for i in table)))

    def truncate(self, seq: Sequence) -> None:
        """Cut the table of `seq` back to the blocks that hold a computed token, `seq.num_computed_tokens` of them.

        Blocks that were reserved for draft tokens that were rejected go back to the front of the free list
        (`prepend(self._free, block)`), for they hold nothing that could be found again; the first in the table is the next to be taken.
        None of them is shared or has a name: only blocks of tokens that were sampled have. Listeners hear of each:
        `TableCut(seq.seq_id, block_id)`.
        """
        needed = -(-seq.num_computed_tokens // self.block_size)
        while len(seq.block_table) > needed:
            block = self.blocks[seq.block_table.pop()]
            block.ref_count -= 1
            prepend(self._free, block)
            if self.events.on:
                self.events.emit(TableCut(seq.seq_id, block.block_id))

    def block_states(self) -> Iterable[BlockState]:
        """The blocks that a sequence holds or that have a name."""
        free = {*self._free}
        for block in self.blocks:
            is_free = block in free
            if block.ref_count or not is_free or block.hash is not None:
                name = block.hash, block.serial, block.parent, block.token_ids
                yield BlockState(block.block_id, block.ref_count, is_free, *name)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def _num_missing(self, seq: Sequence, num_new_tokens: int) -> int:
        """Blocks that the table lacks to cover the next tokens."""
        needed = -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
        return needed - len(seq.block_table) if needed > len(seq.block_table) else 0

    def _take(self) -> int:
        """A free block's id; the block now has one owner."""
        block = self._free.popleft()
        block.ref_count = 1
        if self.events.on:
            self.events.emit(BlockTaken(block.block_id))
        return block.block_id

    @staticmethod
    def slots(block_table: list[int], block_size: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """Where tokens `start` to `end - 1` of a sequence go in the paged cache, [end - start].

        Token `p` lies in the sequence's block number `p // block_size`, whose place in the cache is
        `block_table[p // block_size]`, at offset `p % block_size`: the virtual address and its translation.
        """
        positions = np.arange(start, end)
        blocks = np.asarray(block_table)[positions // block_size]
        return blocks * block_size + positions % block_size
