"""Tags in text that comes in pieces."""

from __future__ import annotations


def common_part(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`: they are not shown yet."""
    most = min(len(text), len(tag) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(tag[:n])), 0)
