"""A ring buffer of messages in shared memory, from one writer to several readers."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from folovllm.step.schedule import Int32

SLOTS = 4
T = TypeVar("T")


class Ring:
    """Messages of int32 numbers, in order, from one writer to `num_readers` readers.

    Message n is in slot n % SLOTS until message n + SLOTS overwrites it. The writer may overwrite n only after every reader
    has taken it. The memory has no name, only a file descriptor that children inherit. So the system frees it when all
    processes have ended. It allocates a page when the page is first written.
    """

    def __init__(self, num_readers: int, capacity: int, fd: int | None = None) -> None:
        """Make a new ring, or open the one behind `fd` (with the same numbers)."""
        head = 8 * (1 + num_readers + SLOTS)
        size = head + 4 * SLOTS * capacity
        self.fd = anonymous_file(size) if fd is None else fd
        memory = mmap.mmap(self.fd, size)
        numbers = np.frombuffer(memory, np.int64, 1 + num_readers + SLOTS)
        self._written = numbers[:1]  # number of messages so far
        self._taken = numbers[1 : 1 + num_readers]  # number of messages that each reader has taken
        self._lengths = numbers[1 + num_readers :]
        self._slots = np.frombuffer(memory, np.int32, offset=head).reshape(SLOTS, capacity)
        self._fence = threading.Lock()

    def has_room(self) -> bool:
        """Return whether every reader has taken the message in the next slot."""
        return int(self._written[0] - self._taken.min()) < SLOTS

    def write(self, message: Int32) -> int:
        """Publish a message and return its number. Call it only when `has_room`.

        First the message and its length, then `_order()`, then the count: a reader that sees the count sees the rest.
        """
        number = int(self._written[0])
        self._slots[number % SLOTS, : len(message)] = message
        self._lengths[number % SLOTS] = len(message)
        self._order()
        self._written[0] = number + 1
        return number

    def read(self, reader: int, number: int | None = None) -> Int32 | None:
        """Return a copy of the message that this reader has not taken yet, or of a later one by its `number`; None if nobody
        has written it yet.

        `_order()` stands between a look at the count and a look into the slot, and again before the reader says that
        it has taken the message: from then on the writer may write over the slot.
        """
        number = int(self._taken[reader]) if number is None else number
        if self._written[0] <= number:
            return None
        self._order()
        message = self._slots[number % SLOTS, : self._lengths[number % SLOTS]].copy()
        self._order()
        self._taken[reader] = number + 1
        return message

    def close(self) -> None:
        """Close the ring. Its memory is freed when the last process closes it. Later reads return None."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._written, self._taken = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._lengths, self._slots = np.zeros(SLOTS, np.int64), np.zeros((SLOTS, 0), np.int32)

    def _order(self) -> None:
        """A memory fence: no processor moves memory accesses across this call. Taking a lock guarantees that."""
        with self._fence:
            pass


def anonymous_file(size: int) -> int:
    """Make an unnamed file of `size` bytes in memory, and return its descriptor."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("folovllm-ring")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def wait_for(poll: Callable[[], T | None], spin: float, check: Callable[[], None] = lambda: None) -> T:
    """Call `poll` until its value is not None, and return that value.

    For `spin` seconds there is no pause between the calls. Then pauses grow with the wait, up to a millisecond, and `check`
    is called before each pause. It raises an error when the value cannot come any more.
    """
    start = time.perf_counter()
    while (value := poll()) is None:
        waited = time.perf_counter() - start
        if waited > spin:
            check()
            time.sleep(min(1e-3, waited / 8))
    return value
