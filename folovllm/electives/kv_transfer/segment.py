"""Memory that several processes of one host see: K/V go through it from engine to engine, and between a server and its engine.

On Linux it is a file without a name, reached through its owner's process: it goes with the last process that has it, so one
that is killed leaves nothing behind. Elsewhere it is a temporary file.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache

from folovllm.electives.kv_transfer.wire import MOST_BYTES, NONCE, Layout, SegmentRef

START = mmap.PAGESIZE  # the nonce stands before it
HAS_SEALS = hasattr(os, "memfd_create")
NUM_SEGMENTS = 4  # that one process fills at a time
MOST_MAPPED = 12  # that one process keeps mapped


class Segment:
    """A segment that this process owns. Nobody reads what is written to it after `close`, here or elsewhere."""

    def __init__(self, num_bytes: int) -> None:
        if HAS_SEALS:
            self._file = os.memfd_create("folovllm-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, path = tempfile.mkstemp(prefix="folovllm-kv-")
        os.ftruncate(self._file, START + num_bytes)
        if HAS_SEALS:  # nobody who reads it can be cut off
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.ref = SegmentRef(path, secrets.token_bytes(NONCE))
        memory = mmap.mmap(self._file, START + num_bytes)
        memory[:NONCE] = self.ref.nonce
        self.data = memoryview(memory)[START:]

    def close(self) -> None:
        """Give it back. Who has it open still sees what was last in it."""
        os.close(self._file)
        if not HAS_SEALS:
            os.unlink(self.ref.path)


@lru_cache(MOST_MAPPED)
def open_segment(ref: SegmentRef) -> memoryview | None:
    """What a segment holds; None if it is not there, as on another host. It stays mapped until many others have come."""
    try:
        with open(ref.path, "r+b", buffering=0) as file:
            if HAS_SEALS and not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                return None  # it may become shorter while it is read
            memory = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):
        return None
    return memoryview(memory)[START:] if memory[:NONCE] == ref.nonce else None


class SegmentPool:
    """Segments for a few transfers at a time: so there is a bound to this memory, however many peers ask."""

    def __init__(self, layout: Layout) -> None:
        """Raises ValueError for blocks that are too large."""
        self.layout, self.num_blocks = layout, MOST_BYTES // layout.block_bytes
        if not self.num_blocks:
            raise ValueError(f"a block of {layout.block_bytes} bytes does not travel: choose a smaller block_size")
        self._free, self._room = list[Segment](), asyncio.Semaphore(NUM_SEGMENTS)

    @asynccontextmanager
    async def segment(self) -> AsyncIterator[Segment]:
        """A segment for a while. After an error somebody may still read it, so it is never written again."""
        async with self._room:
            segment = self._free.pop() if self._free else Segment(self.num_blocks * self.layout.block_bytes)
            try:
                yield segment
            except BaseException:
                segment.close()
                raise
            self._free.append(segment)

    def close(self) -> None:
        """Give back what is free."""
        while self._free:
            self._free.pop().close()
