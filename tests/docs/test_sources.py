"""Where the book answers the texts that the course grew from: each place is there, and what has none says why."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from tests.docs.blocks import ROOT, parsed

DOCS = ROOT / "docs"
SOURCES: dict[str, dict[str, dict[str, Any]]] = tomllib.loads((DOCS / "data/sources.toml").read_text("utf-8"))
ENTRIES = [
    (f"{text}: {key}", entry)
    for text, parts in SOURCES.items()
    for part in parts.values()
    for key, entry in part.items()
]


@cache
def anchors(page: str) -> set[str]:
    """The anchors that mkdocs gives to the headings of a page."""
    tokens = parsed((DOCS / page).read_text("utf-8"))
    titles = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {slug(title) for title in titles}


def slug(title: str) -> str:
    """As Markdown's table of contents does it."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def missing(place: str) -> str:
    """What is wrong with "page.md#anchor"; nothing if it is there."""
    page, _, anchor = place.partition("#")
    if not (DOCS / page).is_file():
        return f"there is no docs/{page}"
    return f"{page} has no heading #{anchor}" if anchor and anchor not in anchors(page) else ""


@pytest.mark.parametrize(("what", "entry"), ENTRIES, ids=[what for what, _ in ENTRIES])
def test_it_is_answered_or_says_why_not(what: str, entry: Any) -> None:
    if isinstance(entry, dict):
        assert len(entry) == 1 and set(entry) <= {"not", "later"} and all(entry.values()), (
            f"{what}: not or later, and why"
        )
        return
    places = [entry] if isinstance(entry, str) else entry
    assert places and not [said for place in places if (said := missing(place))]
