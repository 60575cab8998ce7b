"""Blocks in files: each is written once, beside what it claims to be, and believed only if all of that is true."""

from __future__ import annotations

import os
import tempfile
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from threading import Lock

import xxhash

MAGIC = b"FOLOKV02"
NAME = "folovllm-kv"  # of our folder in the user's
SUFFIX = ".kv"
STALE = 3600.0  # seconds after which a file that was never completed is nobody's


def private_folder(parent: Path) -> Path:
    """Make our folder in `parent`, readable by us alone: K/V tell what was asked. Raises ValueError where that cannot be."""
    folder = parent / NAME
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise ValueError("it is not a folder of yours")
        folder.chmod(0o700)
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"kv_offload_dir: nothing can be written to {str(folder)!r:.300}: {why}") from error
    return folder


def file_of(folder: Path, key: bytes, rank: int = 0) -> str:
    """The path of the file of a block's part on a rank."""
    return f"{folder}/{key.hex()}.{rank}{SUFFIX}"


class BlockFiles:
    """A rank's files, one a block: what it claims to be (`claim`), then its K/V. Threads share it.

    Together they have at most `most_bytes`, besides those that are being written: the oldest go. A file that was read counts as new.
    """

    def __init__(self, folder: Path, rank: int, most_bytes: int) -> None:
        self._folder, self._rank, self._most_bytes, self._lock = folder, rank, most_bytes, Lock()
        found = []
        for entry in os.scandir(folder):
            with suppress(OSError):
                info = entry.stat()
                if entry.name.endswith(f".{rank}{SUFFIX}"):
                    found.append((info.st_mtime_ns, entry.path, info.st_size))
                elif entry.name.startswith("tmp") and time.time() - info.st_mtime > STALE:
                    os.unlink(entry.path)
        self._sizes = OrderedDict((path, size) for _, path, size in sorted(found))  # the oldest first
        self._used = sum(self._sizes.values())

    def write(self, key: bytes, token_ids: bytes, payload: memoryview) -> None:
        """Write a block so that its file is there completely or not at all. Raises OSError: the disk is full or broken."""
        head, path = claim(key, token_ids, payload), file_of(self._folder, key, self._rank)
        handle, name = tempfile.mkstemp(prefix="tmp", dir=self._folder)  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines((head, payload))
            os.replace(name, path)
        finally:
            remove(name)
        with self._lock:
            self._used += len(head) + len(payload) - self._sizes.pop(path, 0)
            self._sizes[path] = len(head) + len(payload)
            while self._used > self._most_bytes:
                oldest, size = self._sizes.popitem(last=False)
                self._used -= size
                remove(oldest)

    def read(self, key: bytes, token_ids: bytes, out: memoryview) -> bool:
        """Read a block into `out`. False if it is not there, or is not what it claims to be: then its file is removed."""
        path = file_of(self._folder, key, self._rank)
        try:
            with open(path, "rb") as file:
                claimed = file.read(len(MAGIC) + 16 + len(token_ids))
                is_whole = file.readinto(out) == len(out) and not file.read(1)
        except OSError:
            return False
        if is_whole and claimed == claim(key, token_ids, out):
            with suppress(OSError, KeyError):
                os.utime(path)
                self._sizes.move_to_end(path)
            return True
        remove(path)
        return False


def remove(path: str) -> None:
    """Remove a file, if it is there."""
    with suppress(OSError):
        os.unlink(path)


def claim(key: bytes, token_ids: bytes, payload: memoryview) -> bytes:
    """What stands before a block's K/V: a checksum of its key, its tokens and its K/V, and its tokens."""
    digest = xxhash.xxh3_128(key + token_ids)
    digest.update(payload)
    return MAGIC + digest.digest() + token_ids
