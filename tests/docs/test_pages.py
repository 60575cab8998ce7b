"""What the pages look like to a reader: chapters of a bearable length, tables that are tables, comments in full."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from milestones.manifest import Course
from tests.docs.blocks import ROOT, pages, parsed

WORDS, LINES, COLUMNS = 4500, 150, 120
COURSE = Course(ROOT)
DOCS = sorted((ROOT / "docs").rglob("*.md"))
CHAPTERS = [page for page in DOCS if re.fullmatch(r"\w*\d_\w+\.md", page.name)]  # electives' too; words are English


def num_words(text: str) -> int:
    """Words of prose, tables and lists; not those of code, formulas and comments."""
    prose = [token.content for token in parsed(text) if token.type == "inline"]
    return sum(len(re.findall(r"\w+(?:[-'.,/]\w+)*", re.sub(r"\$+[^$]*\$+|\]\([^)]*\)", " ", line))) for line in prose)


def num_code_lines(text: str) -> int:
    """Lines in fenced blocks: code, commands and what they print. A diagram is a picture."""
    fences = [token for token in parsed(text) if token.type == "fence" and token.info != "mermaid"]
    return sum(len(token.content.splitlines()) for token in fences)


def rows_as_text(text: str) -> list[str]:
    """Lines that look like a table's rows and are none: a blank line or a missing head makes a paragraph of them."""
    lines = (line for token in parsed(text) if token.type == "inline" for line in token.content.splitlines())
    return [line for line in lines if re.match(r"\s*\|.*\|\s*$", line)]


def wide_comments(text: str) -> list[str]:
    """Lines of shown code that are too long for the page, and end in a comment."""
    lines = (line for token in parsed(text) if token.type == "fence" for line in token.content.splitlines())
    return [line for line in lines if len(line) > COLUMNS and re.search(r"\s# ", line)]


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.name)
def test_a_chapter_can_be_read_in_one_sitting(page: Path) -> None:
    text = page.read_text("utf-8")
    words, lines = num_words(text), num_code_lines(text)
    assert words <= WORDS, f"{words} words, at most {WORDS}: move something to a reference page"
    assert lines <= LINES, f"{lines} lines of code, at most {LINES}: show less of it"


def test_chapters_ask_about_five_of_their_wrong_answers() -> None:
    """In both editions about the same ones; the answers are folded."""
    chapters = [(m, ROOT / page) for m in COURSE.milestones for page in m.chapters]
    asking = [(m, page) for m, page in chapters if "\n## Five wrong answers\n" in page.read_text("utf-8")]
    assert len(asking) >= 10
    for milestone, chapter in asking:
        there = {file.stem for file in milestone.folder.glob("wrong/*.py")}
        for page in (chapter, chapter.with_suffix(".zh.md")):
            cards = re.findall(r"<details markdown=\"1\">\n<summary>.*?</details>", page.read_text("utf-8"), re.S)
            asked = re.findall(rf"`({milestone.id}\.\d+_\w+)`", "".join(cards))
            assert len(asked) == len({*asked} & there) == 5, f"{page.name}: {asked}"


def waste(block: float, _: int, mean: float) -> float:
    lengths = range(1, 2 * int(mean))
    return 100 * (1 - sum(lengths) / sum(-(-n // int(block)) * int(block) for n in lengths))


def chunk(tokens: float, column: int, _: float) -> float:
    step = 3.8 + 0.022 * tokens  # ms
    return step if column == 1 else 16_000 / tokens * step


def speed(k: float, _: int, acceptance: float) -> float:
    return sum(acceptance**i for i in range(int(k) + 1)) / (1 + 0.43 / 3 * k)


@pytest.mark.parametrize(("name", "formula"), [("3_paged_kv", waste), ("5_reuse", chunk), ("x3_speculation", speed)])
def test_a_table_to_touch_is_its_formula(name: str, formula: Callable[[float, int, float], float]) -> None:
    for page in (f"{name}.md", f"{name}.zh.md"):
        (box,) = re.findall(r'<div class="touch".*?</div>', (ROOT / "docs" / page).read_text("utf-8"), re.S)
        rows = [
            [cell.strip(" %").replace(",", "") for cell in row.split("|")[1:-1]]
            for row in box.split("\n")
            if "|" in row
        ]
        assert len(rows) > 6
        for head, *cells in rows[2:]:
            for i, cell in enumerate(cells, 1):
                mean = float(rows[0][i]) if formula is not chunk else 0.0
                wanted = formula(float(head), i, mean)
                assert cell == f"{wanted:.{len(cell.partition('.')[2])}f}", (page, head, i)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_row_of_a_table_is_text(page: Path) -> None:
    assert rows_as_text(page.read_text("utf-8")) == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_comments_are_shown_in_full(page: Path) -> None:
    assert len(wide := wide_comments(page.read_text("utf-8"))) == 0, wide
