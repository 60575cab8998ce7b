"""Files: read with one sentence for whatever is wrong with them, written as a whole or not at all, and kept in a cache."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and rename it: until all is written, what was there before stays as it was.

    What is no regular file (a pipe, `/dev/stdout`) is written to as it is; a link stays a link.

    Raises:
        ValueError: it cannot be written. Nothing is left beside it.
    """
    data = content.encode() if isinstance(content, str) else content
    target = path.resolve()
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        try:
            beside.write_bytes(data)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}. Name a file in a folder with room") from error


def cache_dir() -> Path:
    """Where converted models are kept: `FOLOVLLM_CACHE`, else `$XDG_CACHE_HOME/folovllm`, else `~/.cache/folovllm`."""
    if own := os.environ.get("FOLOVLLM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "folovllm"


class UnreadableFile(ValueError):
    """A user's file is at fault. The sentence names the file, and the key or tensor where it is one."""


@contextmanager
def reading(what: object, key: str = "") -> Iterator[None]:
    """Turn any fault that arises while a user's file is read into one sentence with its name. The cause stays attached.

    Libraries raise nearly everything there is at a damaged file, so that no list of exceptions would be complete: those in
    Rust also panic, which is no `Exception`. An unwritten exercise and a full device are not the file's fault, and pass.

    Args:
        what: the file, or what is read from it.
        key: the field or tensor that is read, for messages that do not name it.

    Raises:
        UnreadableFile: something went wrong. One from within the block is passed on as it is.
    """
    try:
        yield
    except (UnreadableFile, NotImplementedError):
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):  # a library's, in Rust
            raise
        if type(error).__name__ == "OutOfMemoryError":
            raise
        said = in_one_line(error)
        place = "" if key in said else f"{printable(key, 100)}: "
        raise UnreadableFile(f"cannot read {what}: {place}{said}") from error


def in_one_line(error: BaseException) -> str:
    """Return a library's message for the end of a sentence, with the exception's type where the message needs it."""
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return printable(f"{kind}{error}", 300).removesuffix(":")


def printable(text: str, most: int) -> str:
    """Return the beginning of a stranger's text, in one line that any terminal may show: no control codes, no half characters."""
    short = textwrap.shorten(text, most, placeholder=" ...")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
