"""Other people's texts within our own sentences. It imports no torch: the page and recordings need none."""

from __future__ import annotations

import textwrap


def in_one_line(error: BaseException) -> str:
    """Return a library's message for the end of a sentence, with the exception's type where the message needs it."""
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return printable(f"{kind}{error}", 300).removesuffix(":")


def printable(text: str, most: int) -> str:
    """Return the beginning of a stranger's text, in one line that any terminal may show: no control codes, no half characters."""
    short = textwrap.shorten(text, most, placeholder=" ...")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
