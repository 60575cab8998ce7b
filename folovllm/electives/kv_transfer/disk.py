"""Blocks in files: each is written once, beside what it claims to be, and believed only if all of that is true."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

MAGIC = b"FOLOKV02"
NAME = "folovllm-kv"  # of our folder in the user's
SUFFIX = ".kv"
STALE = 3600.0  # seconds after which a file that was never completed is nobody's


def private_folder(parent: Path) -> Path:
    """Make our folder in `parent`, readable by us alone: K/V tell what was asked. Raises ValueError where that cannot be."""
    folder = parent / NAME
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        info = folder.lstat()
        is_ours = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()
        if is_ours:
            folder.chmod(0o700)
            with tempfile.TemporaryFile(dir=folder):
                pass
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"kv_offload_dir: nothing can be written to {str(folder)!r:.300}: {why}") from error
    if not is_ours:
        raise ValueError(f"kv_offload_dir: {folder} is not a folder of yours: choose another place")
    return folder


def stored_keys(folder: Path, num_ranks: int) -> Iterator[tuple[bytes, int]]:
    """Yield the keys of complete blocks, which every rank has, with the bytes of all their files; the oldest first. Broken-off files are removed."""
    found: dict[str, list[os.stat_result]] = {}
    for entry in os.scandir(folder):
        with suppress(OSError):
            if entry.name.startswith("tmp") and time.time() - entry.stat().st_mtime > STALE:
                os.unlink(entry.path)
            elif entry.name.endswith(SUFFIX):
                found.setdefault(entry.name.split(".")[0], []).append(entry.stat())
    for name, stats in sorted(found.items(), key=lambda pair: pair[1][0].st_mtime_ns):
        with suppress(ValueError):
            if len(stats) == num_ranks:  # of another number of ranks there are other keys
                yield bytes.fromhex(name), sum(each.st_size for each in stats)


class BlockFiles:
    """A rank's files, one a block: what it claims to be (`claim`), then its K/V."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def path(self, key: bytes) -> Path:
        """The file of a block."""
        return self._folder / f"{key.hex()}.{self._rank}{SUFFIX}"

    def write(self, key: bytes, token_ids: bytes, payload: memoryview) -> None:
        """Write a block so that its file is there completely or not at all. Raises OSError: the disk is full or broken."""
        handle, name = tempfile.mkstemp(prefix="tmp", dir=self._folder)  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(claim(key, token_ids, payload))
                file.write(payload)
            os.replace(name, self.path(key))
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def read(self, key: bytes, token_ids: bytes, out: memoryview) -> bool:
        """Read a block into `out`. False if it is not there, or is not what it claims to be: then its file is removed."""
        try:
            with self.path(key).open("rb") as file:
                claimed = file.read(len(MAGIC) + 16 + len(token_ids))
                is_whole = file.readinto(out) == len(out) and not file.read(1)
        except OSError:
            return False
        if is_whole and claimed == claim(key, token_ids, out):
            with suppress(OSError):
                os.utime(self.path(key))  # the oldest go first
            return True
        self.remove(key)
        return False

    def remove(self, key: bytes) -> None:
        """Remove a block's file, if it is there."""
        with suppress(OSError):
            self.path(key).unlink()


def claim(key: bytes, token_ids: bytes, payload: memoryview) -> bytes:
    """What stands before a block's K/V: a checksum of its key, its tokens and its K/V, and its tokens."""
    digest = xxhash.xxh3_128(key + token_ids)
    digest.update(payload)
    return MAGIC + digest.digest() + token_ids
