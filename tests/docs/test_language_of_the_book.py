"""How the book speaks: the field's words, sentences that can be read, exercises where their ideas are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from milestones.manifest import Course
from milestones.tasks import Exercise
from tests.docs.blocks import ROOT, parsed

COURSE = Course(ROOT)
OUT = {
    r"draws? a token|draws? tokens|drawn tokens?": "sample a token",
    r"record(ed)? (a |the )?(decode )?(steps?|graphs?)": "captured step, capture a graph (a recording is what the inspector replays)",
    r"come what may|it is thought of|of whom nothing is known": "say who does what",
}
ON_PAGES = OUT | {  # in a notebook the reader guesses
    r"(right|wrong) guess(es)?|guess(es)? (is|are|was|were) (right|wrong|checked)|checks? (all )?guesses": "draft tokens, verified, accepted or rejected",
    r"\b(its|a|each|every|no) share (leaves|belongs|has|is in|says)": "scheduled sequence",
}
WORDS = 45  # of a sentence
MEASURED = ("performance.md", "performance_log.md", "reading_order.md")  # lists of figures, a list of files
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if not page.name.endswith(".zh.md")]
READ = [page for page in PAGES if page.name not in MEASURED]


def prose(text: str) -> Iterator[str]:
    """The paragraphs and list items of a page, without tables, code, formulas and addresses."""
    tables = 0
    for token in parsed(text):
        tables += (token.type == "table_open") - (token.type == "table_close")
        if token.type == "inline" and not tables:
            yield re.sub(r"\$+[^$]*\$+|`[^`]*`|\]\([^)]*\)", " X ", token.content).replace("\n", " ")


def long_sentences(text: str) -> list[str]:
    """Sentences of more than WORDS words."""
    sentences = (s for paragraph in prose(text) for s in re.split(r"(?<=[.?!])\**[)\"]?\**\s+", paragraph))
    return [s for s in sentences if len(re.findall(r"\w+(?:[-'.,/]\w+)*", s)) > WORDS]


def found(text: str, out: dict[str, str]) -> list[str]:
    """What stands in a text and should not, with what to write."""
    plain = re.sub(r"\s+", " ", text)
    return [f"{m[0]!r}: {say}" for phrase, say in out.items() for m in re.finditer(rf"(?i)\b({phrase})\b", plain)]


def docstrings(file: Path) -> str:
    """All docstrings of a module."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(file.read_text("utf-8"))
    return "\n".join(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, nodes))


@pytest.mark.parametrize("exercise", COURSE.exercises, ids=str)
def test_an_exercise_stands_where_its_idea_is_explained(exercise: Exercise) -> None:
    pages = COURSE.milestone(exercise.id.partition(".")[0]).chapters
    text = "".join((ROOT / page).read_text("utf-8").partition("## Your turn")[0] for page in pages)
    (says,) = re.findall(rf"^> \*\*Exercise {re.escape(exercise.id)}\b.*$", text, re.M)
    symbols = [str(symbol).partition(":") for symbol in exercise.symbols]
    names = [name for _, _, name in symbols] + [f"mine/{module.replace('.', '/')}.py" for module, _, _ in symbols]
    assert [name for name in names if f"`{name}`" not in says] == [], f"{exercise.id}: {says}"


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_too_long(page: Path) -> None:
    assert long_sentences(page.read_text("utf-8")) == []


def test_pages_use_the_fields_words() -> None:
    said = {page.name: found(" ".join(prose(page.read_text("utf-8"))), ON_PAGES) for page in READ}
    assert {name: words for name, words in said.items() if words} == {}


def test_notebooks_and_docstrings_use_the_fields_words() -> None:
    notebooks = {file: file.read_text("utf-8") for file in (ROOT / "notebooks/src").glob("*.py")}
    texts = notebooks | {file: docstrings(file) for file in (ROOT / "folovllm").rglob("*.py")}
    said = {str(file.relative_to(ROOT)): found(text, OUT) for file, text in texts.items()}
    assert {name: words for name, words in said.items() if words} == {}
