"""What the driver knows of host memory: which block is in which slot, on all ranks alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Slot:
    """A block's place in host memory."""

    number: int
    hash: int | None = None  # of the block in it; None: there is none, or it was forgotten
    token_ids: bytes = b""
    transfers: int = 0  # from or to it that are under way


class HostIndex:
    """The slots with a block, by the block's hash, least recently used first.

    Invariant: a slot is free, or has a block, or transfers go on, or the last two. It gets another block only when no transfer goes on.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = [Slot(i) for i in reversed(range(num_slots))]
        self._by_hash: OrderedDict[int, Slot] = OrderedDict()

    def get(self, hash_: int) -> Slot | None:
        """The slot of a block, if it is there."""
        return self._by_hash.get(hash_)

    def touch(self, hash_: int) -> None:
        """A block that is there counts as used now."""
        self._by_hash.move_to_end(hash_)

    def slots(self) -> list[Slot]:
        """All slots that have a block."""
        return list(self._by_hash.values())

    def put(self, hash_: int, token_ids: bytes) -> tuple[Slot | None, int | None]:
        """A slot for a block that is not there, and the hash of the block that must go for it. None if transfers hold every slot."""
        if self._free:
            slot, evicted = self._free.pop(), None
        else:
            for evicted, slot in self._by_hash.items():
                if not slot.transfers:
                    break
            else:
                return None, None
            del self._by_hash[evicted]
        self._by_hash[hash_] = slot
        slot.hash, slot.token_ids = hash_, token_ids
        return slot, evicted

    def drop(self, hash_: int) -> None:
        """Forget a block that is there."""
        slot = self._by_hash.pop(hash_)
        slot.hash = None
        if not slot.transfers:
            self._free.append(slot)

    def clear(self) -> None:
        """Forget all blocks."""
        for hash_ in list(self._by_hash):
            self.drop(hash_)

    def hold(self, slot: Slot) -> None:
        """A transfer from or to a slot begins."""
        slot.transfers += 1

    def release(self, slots: Iterable[Slot]) -> None:
        """A transfer has ended in each of these slots. One whose block was forgotten meanwhile may be free now."""
        for slot in slots:
            slot.transfers -= 1
            if slot.hash is None and not slot.transfers:
                self._free.append(slot)
