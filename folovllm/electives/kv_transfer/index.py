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


class HostIndex(OrderedDict[int, Slot]):
    """The slots with a block, by the block's hash, least recently used first.

    Invariant: a slot is free, or has a block, or transfers go on, or the last two. It gets another block only when no transfer goes on.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.free = [Slot(i) for i in reversed(range(num_slots))]

    def put(self, hash_: int, token_ids: bytes) -> tuple[Slot | None, int | None]:
        """A slot for a block that is not there, and the hash of the block that must go for it. None if transfers hold every slot."""
        evicted = None
        if not self.free:
            evicted = next((other for other, slot in self.items() if not slot.transfers), None)
            if evicted is None:
                return None, None
            self.drop(evicted)
        slot = self[hash_] = self.free.pop()
        slot.hash, slot.token_ids = hash_, token_ids
        return slot, evicted

    def drop(self, hash_: int) -> None:
        """Forget a block that is there."""
        slot = self.pop(hash_)
        slot.hash = None
        if not slot.transfers:
            self.free.append(slot)

    def hold(self, slot: Slot) -> None:
        """A transfer from or to a slot begins."""
        slot.transfers += 1

    def release(self, slots: Iterable[Slot]) -> None:
        """A transfer has ended in each of these slots. One whose block was forgotten meanwhile may be free now."""
        for slot in slots:
            slot.transfers -= 1
            if slot.hash is None and not slot.transfers:
                self.free.append(slot)
