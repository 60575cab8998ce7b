"""Blocks that no sequence holds, least recently freed first, each removable from the middle in O(1)."""

from __future__ import annotations

from dataclasses import dataclass, field

from folovllm.event_stream import Events
from folovllm.events import BlockClaimed, BlockFreed


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
    _previous: Block | None = field(default=None, repr=False)  # neighbours in the free list
    _next: Block | None = field(default=None, repr=False)


class FreeList:
    """A doubly linked list through the blocks themselves: no search, no allocation."""

    def __init__(self, blocks: list[Block], events: Events | None = None) -> None:
        self._events = Events() if events is None else events
        self._ends = Block(-1)  # a sentinel between the last and the first: no end is a special case
        self._ends._previous = self._ends._next = self._ends
        self._length = 0
        for block in blocks:
            self._link(block)

    def __len__(self) -> int:
        return self._length

    def append(self, block: Block) -> None:
        """Add the most recently freed block."""
        self._link(block)
        if self._events.on:
            self._events.emit(BlockFreed(block.block_id))

    def _link(self, block: Block) -> None:
        last = self._ends._previous
        assert last is not None
        block._previous, block._next = last, self._ends
        last._next = self._ends._previous = block
        self._length += 1

    def remove(self, block: Block) -> None:
        """Take a block out, wherever it is."""
        before, after = block._previous, block._next
        assert before is not None and after is not None, (
            f"block {block.block_id} is not free, so it cannot be taken out"
        )
        before._next, after._previous = after, before
        block._previous = block._next = None
        self._length -= 1
        if self._events.on:
            self._events.emit(BlockClaimed(block.block_id))

    def popleft(self) -> Block:
        """Take the least recently freed block. Raises IndexError if there is none."""
        block = self._ends._next
        if block is None or block is self._ends:
            raise IndexError("no free block")
        self.remove(block)
        return block


def prepend(free: FreeList, block: Block) -> None:
    """Add a block that holds nothing of use: the next one to be taken."""
    free.append(block)
    ends, first, last = free._ends, free._ends._next, block._previous
    if first is block:
        return
    assert first is not None and last is not None
    last._next, ends._previous = ends, last
    block._previous, block._next = ends, first
    ends._next = first._previous = block
