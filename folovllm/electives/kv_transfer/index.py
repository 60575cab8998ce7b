"""What the driver knows of the store: which block is in which slot of host memory, on all ranks alike."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Entry:
    """A block in host memory."""

    key: bytes
    token_ids: bytes
    slot: int
    holds: int = 0  # transfers from or to the slot
    is_coming: bool = False  # a load reads it


class HostIndex:
    """Blocks by key, least recently used first.

    Invariant: a slot is free, or an entry's, or a transfer under way holds it (`hold`), or the last two. Only a slot that nothing holds
    gets another block.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(reversed(range(num_slots)))
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()

    def get(self, key: bytes) -> Entry | None:
        """The block, if it is there."""
        return self._entries.get(key)

    def touch(self, key: bytes) -> None:
        """A block that is there counts as used now."""
        self._entries.move_to_end(key)

    def put(self, key: bytes, token_ids: bytes) -> tuple[Entry | None, bytes | None]:
        """A slot for a new block, and the key of the block that had to go for it. None if transfers hold every slot."""
        gone = None
        if not self._free:
            gone = next((key for key, entry in self._entries.items() if not entry.holds), None)
            if gone is None:
                return None, None
            self.drop(gone)
        entry = self._entries[key] = Entry(key, token_ids, self._free.pop())
        return entry, gone

    def drop(self, key: bytes) -> None:
        """Forget a block, if it is there."""
        if (entry := self._entries.pop(key, None)) is not None and not entry.holds:
            self._free.append(entry.slot)

    def entries(self) -> list[Entry]:
        """All blocks."""
        return list(self._entries.values())

    def clear(self) -> None:
        """Forget all blocks."""
        for key in list(self._entries):
            self.drop(key)

    def hold(self, entry: Entry) -> None:
        """A transfer from or to a block's slot begins."""
        entry.holds += 1

    def release(self, entry: Entry) -> None:
        """It has ended. The slot is free if the block was forgotten meanwhile."""
        entry.holds -= 1
        if not entry.holds and self._entries.get(entry.key) is not entry:
            self._free.append(entry.slot)
