"""Files that are written as a whole or not at all, and the folder of what is kept."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and rename it: until all is written, what was there before stays as it was.

    What is no regular file (a pipe, `/dev/stdout`) is written to as it is; a link stays a link. Raises ValueError if it cannot
    be written; nothing is left beside it.
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
