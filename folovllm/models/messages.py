"""Other people's texts within our own sentences. It imports no torch: the page and recordings need none."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TORCH_NAMES = {  # of safetensors' dtypes
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def torch_names(stored: Iterable[str]) -> list[str]:
    """Return torch's names of dtypes that are named as safetensors does."""
    return [TORCH_NAMES.get(name, name) for name in stored]


def in_one_line(error: BaseException) -> str:
    """Return at most 300 characters of a library's message for the end of a sentence, with the type in front unless it is a ValueError or OSError."""
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return printable(f"{kind}{error}", 300).removesuffix(":")


def printable(text: str, most: int) -> str:
    """Return a stranger's text in one line that any terminal may show: cut to `most` characters, then unprintable ones escaped."""
    short = textwrap.shorten(text, most, placeholder=" ...")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def some_of(names: Iterable[str]) -> str:
    """Return the first five names in order, and how many there are beside."""
    listed = sorted(set(names))
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def what_is_wrong(report: Mapping[str, Any], path: Path) -> str:
    """Return a sentence about a checkpoint that does not fit, from transformers' report of its tensors."""
    if report["missing_keys"]:
        return f"the checkpoint in {path} lacks {some_of(report['missing_keys'])}"
    name, stored, wanted = min(report["mismatched_keys"])
    return f"{name!r} has shape {list(stored)}, the model expects {list(wanted)}: {path} is damaged"
