"""What the driver knows of the store: which block is in which slot of host memory, on all ranks alike."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class Entry:
    """A block in host memory."""

    slot: int
    token_ids: bytes
    is_on_disk: bool = False


class HostIndex:
    """Blocks by key, least recently used first.

    Invariant: a slot is free, or an entry's, or a transfer under way holds it (`hold`), or the last two. Only a slot that nothing holds
    gets another block.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(reversed(range(num_slots)))
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._holds: Counter[int] = Counter()  # by slot
        self._orphans: set[int] = set()  # slots that are held for a block that is forgotten

    def get(self, key: bytes) -> Entry | None:
        """The block, which counts as used now."""
        if (entry := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: bytes, token_ids: bytes) -> tuple[Entry | None, bytes | None]:
        """A slot for a new block, and the key of the block that had to go for it. None if transfers hold every slot."""
        gone = None
        if not self._free:
            gone = next((key for key, entry in self._entries.items() if not self._holds[entry.slot]), None)
            if gone is None:
                return None, None
            self.drop(gone)
        entry = self._entries[key] = Entry(self._free.pop(), token_ids)
        return entry, gone

    def drop(self, key: bytes) -> None:
        """Forget a block, if it is there."""
        if (entry := self._entries.pop(key, None)) is not None:
            if self._holds[entry.slot]:
                self._orphans.add(entry.slot)
            else:
                self._free.append(entry.slot)

    def clear(self) -> None:
        """Forget all blocks."""
        for key in list(self._entries):
            self.drop(key)

    def hold(self, slot: int) -> None:
        """A transfer from or to a slot begins."""
        self._holds[slot] += 1

    def release(self, slot: int) -> None:
        """It has ended."""
        self._holds[slot] -= 1
        if not self._holds[slot]:
            del self._holds[slot]
            if slot in self._orphans:
                self._orphans.remove(slot)
                self._free.append(slot)
