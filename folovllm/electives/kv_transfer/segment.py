"""Memory that several processes of one host see: K/V go through it from engine to engine, and between a server and its engine.

On Linux it is a file without a name, reached through its owner's process: it goes with the last process that has it, so one
that is killed leaves nothing behind. Elsewhere it is a temporary file, and K/V go to other engines by socket.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
import tempfile

from folovllm.electives.kv_transfer.wire import LONGEST_PIECE, NONCE, SegmentRef, WireError

START = mmap.PAGESIZE  # the nonce stands before it
IS_SHARED = hasattr(os, "memfd_create")
OF_A_PROCESS = re.compile(r"/proc/\d+/fd/\d+", re.ASCII)


class Segment:
    """A segment that this process owns. Nobody reads what is written to it after `close`, here or elsewhere."""

    def __init__(self, num_bytes: int) -> None:
        self._file: int | None = None
        if IS_SHARED:
            self._file = os.memfd_create("folovllm-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, path = tempfile.mkstemp(prefix="folovllm-kv-")
        self.ref = SegmentRef(path, secrets.token_bytes(NONCE), START + num_bytes)
        os.ftruncate(self._file, self.ref.size)
        if IS_SHARED:  # nobody who reads it can be cut off
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._memory = mmap.mmap(self._file, self.ref.size)
        self._memory[:NONCE] = self.ref.nonce

    @property
    def data(self) -> memoryview:
        """All of it but the page with the nonce."""
        return memoryview(self._memory)[START:]

    def close(self) -> None:
        """Give it back. Who has it open still sees what was last in it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            if not IS_SHARED:
                os.unlink(self.ref.path)


def open_segment(ref: SegmentRef, is_ours: bool = False) -> mmap.mmap:
    """Map a segment. Raises WireError if it is not there, not on this host say; another's has no other address than that of a process."""
    if not is_ours and not OF_A_PROCESS.fullmatch(ref.path):
        raise WireError("the peer's memory has no address that could be one")
    if not START <= ref.size <= START + LONGEST_PIECE:
        raise WireError(f"the peer's memory has {ref.size} bytes")
    try:
        file = os.open(ref.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise WireError(f"the peer's memory is not there: {error.strerror}") from error
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size != ref.size:
            raise WireError("the peer's memory is not there: another file is in its place")
        if not is_ours and not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise WireError("the peer's memory may become shorter while it is read")
        memory = mmap.mmap(file, ref.size)
    except OSError as error:
        raise WireError(f"the peer's memory cannot be read: {error.strerror}") from error
    finally:
        os.close(file)
    if memory[:NONCE] != ref.nonce:
        memory.close()
        raise WireError("the peer's memory is not there: another's is in its place")
    return memory
