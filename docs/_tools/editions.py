"""The two editions of the book: which Chinese file stands for what, what is stale in it, and what differs.

The Chinese of `X.md` is `X.zh.md` beside it. A file that is no Markdown has one, too: that of a notebook's source `m4.py` is `m4.zh.md`, with the
Markdown cells; and the docstrings of exercise m2.1, which state it, are translated in `statements/m2.1.zh.md`.

Before each section stands a comment that no reader sees, with the section's name in the source and a hash of its text there:

    <!-- source: what-m3-costs 5f0c2a9d41be -->
    ## M3 的代价

The name is the anchor of the English heading, and a hook of the site gives the Chinese heading the same one: so links are alike in both
editions. Where the source has changed since, the hash is no longer its own: the section is stale. `tools/translation.py` writes the hashes.
"""

from __future__ import annotations

import ast
import hashlib
import html
import json
import re
import sys
import tomllib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from alike import FILLED_IN, differences, plain_text  # noqa: E402

from milestones.language import messages  # noqa: E402
from milestones.manifest import Course  # noqa: E402

COURSE = Course(ROOT)
MARK = re.compile(r"^<!-- source: (\S+)(?: ([0-9a-f]{12}))? -->\n", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)#:\s]+?)(?<!\.zh)\.md(?=[)#])")
BOOK = (
    *("index", "mini", "inspector", "map", "architecture", "performance", "reading_order", "troubleshooting"),
    *(
        f"reference/{name}"
        for name in ("builders", "cli", "configuration", "glossary", "instructors", "life_cycles", "models", "shapes")
    ),
)


@dataclass(frozen=True, slots=True)
class Translated:
    """A section of a Chinese file; `hash` is empty until it is stamped."""

    name: str
    hash: str
    text: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A Chinese file, and what it translates. Neither need exist."""

    target: Path
    source: Path  # a page, a notebook's source, or a milestone's manifest: its exercises' docstrings

    def __str__(self) -> str:
        return self.target.relative_to(ROOT).as_posix()

    def sources(self) -> dict[str, str]:
        """{name: text} of the sections of the source, in order."""
        if self.source.suffix == ".toml":
            return statements(self.target.name.removesuffix(".zh.md"))
        text = self.source.read_text("utf-8")
        return cells(text) if self.source.suffix == ".py" else sections(text)

    def translated(self) -> dict[str, Translated]:
        """{name: section} of the Chinese file; empty if there is none. ValueError for what stands above the first mark."""
        if not self.target.is_file():
            return {}
        above, *parts = MARK.split(self.target.read_text("utf-8"))
        if above.strip():
            raise ValueError(f"{self}: {above.strip().splitlines()[0]!r} is above the first <!-- source: ... -->")
        found = [Translated(n, h or "", t) for n, h, t in zip(parts[::3], parts[1::3], parts[2::3], strict=True)]
        return {section.name: section for section in found}

    def states(self) -> dict[str, str]:
        """{name: "current", "stale", "missing" or "left over"}. A section without a hash is missing."""
        sources, translated = self.sources(), self.translated()
        states = {name: _state(text, translated.get(name)) for name, text in sources.items()}
        return states | dict.fromkeys(translated.keys() - sources.keys(), "left over")

    def differences(self) -> list[str]:
        """What the current sections say otherwise than their sources: code, links, numbers. Stale ones are not compared."""
        sources, translated = self.sources(), self.translated()
        return [
            f"{self}, {name}: {said}"
            for name, state in self.states().items()
            if state == "current"
            for said in differences(sources[name], translated[name].text)
        ]


def _state(source: str, section: Translated | None) -> str:
    if section is None or not section.hash:
        return "missing"
    return "current" if section.hash == hash_of(source) else "stale"


def pairs() -> list[Pair]:
    """All that the Chinese edition has, or is to have."""
    chapters = [ROOT / page for m in COURSE.milestones for page in m.chapters]
    pages = [
        ROOT / "README.md",
        ROOT / "docs/0_what_happens.md",
        *chapters,
        *(ROOT / f"docs/{name}.md" for name in BOOK),
    ]
    pages += [page for m in COURSE.milestones for page in sorted(m.folder.glob("hints/*.md")) if not is_chinese(page)]
    pages += [page for page in sorted((ROOT / "milestones/mini/hints").glob("*.md")) if not is_chinese(page)]
    pages += [b.folder / name for b in COURSE.builders for name in ("task.md", "hints.md")]
    notebooks = [notebook for m in COURSE.milestones for notebook in m.notebooks]
    pages += [ROOT / "notebooks/src" / f"{Path(notebook).stem}.py" for notebook in notebooks]
    stated = [
        Pair(m.folder / "statements" / f"{exercise.id}.zh.md", m.folder / "milestone.toml")
        for m in COURSE.milestones
        for exercise in m.exercises
    ]
    return [*(Pair(chinese(page), page) for page in pages), *stated]


def is_chinese(page: Path) -> bool:
    return page.name.endswith(".zh.md")


def chinese(page: Path) -> Path:
    return page.with_name(f"{page.stem}.zh.md")


def hash_of(text: str) -> str:
    """Of a section. Where its lines break does not matter, nor what a tool fills in, nor how a test runs its commands."""
    return hashlib.sha256(" ".join(plain_text(text).split()).encode()).hexdigest()[:12]


def filled_from(source: str, translation: str) -> str:
    """The translation with all that a tool filled into the source; the words of its tables are translated.

    ValueError for a mark that the source does not have.
    """
    parts = {match[1]: match[0] for match in FILLED_IN.finditer(source)}
    if strangers := [m[1] for m in FILLED_IN.finditer(translation) if m[1] not in parts]:
        raise ValueError(f"the source has no {strangers[0]}")
    return FILLED_IN.sub(lambda match: chinese_tables(parts[match[1]]), translation)


def chinese_tables(text: str) -> str:
    """Cells of tables that `tables.zh.toml` or the course's messages translate, translated; all else as it is."""
    cells = re.compile(r"(?<=\| )((?:\\\||[^|\n])+?)(?= +\|)")
    rows = (cells.sub(lambda m: _chinese_cell(m[1]), row) if row[:1] == "|" else row for row in text.split("\n"))
    return chinese_links("\n".join(rows), ROOT / "docs")


def chinese_links(text: str, folder: Path, but: Path | None = None) -> str:
    """Links from a page in this folder lead to Chinese pages where there are some; not to `but`, the page itself."""

    def link(match: re.Match[str]) -> str:
        there = chinese((folder / f"{match[2]}.md").resolve())
        return f"{match[1]}{match[2]}.zh.md" if there.is_file() and there != but else match[0]

    return LINK.sub(link, text)


@cache
def _chinese_cell(cell: str) -> str:
    return translation(cell, chinese_cells())


def chinese_picture(svg: str) -> str:
    """An SVG with its words translated, where `pictures.zh.toml` has them."""
    said = _words("pictures")

    def say(match: re.Match[str]) -> str:
        return html.escape(translation(html.unescape(match[0]), said), quote=False)

    return re.sub(r"(?<=>)[^<>]+(?=</(?:text|title)>)", say, svg)


def translation(text: str, said: dict[str, str]) -> str:
    """What is said for a text, or the text; a key with `{}` stands for all texts that have something there."""
    if text in said:
        return said[text]
    for key in (key for key in said if "{}" in key):
        if found := re.fullmatch(re.escape(key).replace(r"\{\}", "(.+)"), text):
            return said[key].format(*found.groups())
    return text


@cache
def chinese_cells() -> dict[str, str]:
    said = messages("zh")
    linked = {
        f"[{m.title}]({page})": f"[{said.get(m.title, m.title)}]({page})"
        for m in COURSE.milestones
        for page in [Path(m.chapter).name]
    }
    return _words("tables") | said | linked | _stated()


@cache
def _words(what: str) -> dict[str, str]:
    found: dict[str, str] = tomllib.loads(Path(__file__).with_name(f"{what}.zh.toml").read_text("utf-8"))
    return found


def _stated() -> dict[str, str]:
    """{first sentence of an exercise's docstring: that of its translation, without the full stop}."""
    from excerpts import first_sentence

    found = {}
    for pair in (pair for pair in pairs() if pair.source.suffix == ".toml"):
        translated = pair.translated()
        for symbol in COURSE.exercise(pair.target.name.removesuffix(".zh.md")).symbols:
            if section := translated.get(symbol.name):
                sentence = re.split(r"。|：?\n\n", section.text.strip())[0]
                found[first_sentence(str(symbol))] = sentence.replace("|", "\\|")
    return found


def slug(title: str) -> str:
    """The anchor of a heading, as Markdown's table of contents makes it."""
    plain = unicodedata.normalize("NFKD", re.sub(r"\]\([^)]*\)|[\[`*]", "", title)).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


@cache
def sections(page: str) -> dict[str, str]:
    """{anchor of the heading: text from the heading on}; "top" is what stands above the first."""
    lines, tokens = page.splitlines(keepends=True), MarkdownIt().parse(page)
    starts = [
        (token.map[0], slug(tokens[i + 1].content))
        for i, token in enumerate(tokens)
        if token.type == "heading_open" and token.map and token.level == 0
    ]
    if "".join(lines[: starts[0][0] if starts else None]).strip():
        starts.insert(0, (0, "top"))
    ends = [*(line for line, _ in starts[1:]), len(lines)]
    return _named((name, "".join(lines[start:end])) for (start, name), end in zip(starts, ends, strict=True))


@cache
def cells(source: str) -> dict[str, str]:
    """{slug of the first line: text} of the Markdown cells of a notebook in the percent format."""
    found = re.findall(r"^# %% \[markdown\]\n(.*?)(?=^# %%|\Z)", source, re.M | re.S)
    texts = [re.sub(r"^# ?", "", cell, flags=re.M).strip() + "\n" for cell in found]
    return _named((slug(text.splitlines()[0])[:40].strip("-"), text) for text in texts)


def chinese_notebook(pair: Pair, notebook: str) -> str:
    """A notebook with its Markdown cells translated, where they are; it lies a folder deeper than its source."""
    book, translated = json.loads(notebook), pair.translated()
    written = [cell for cell in book["cells"] if cell["cell_type"] == "markdown"]
    for cell, (name, text) in zip(written, pair.sources().items(), strict=True):
        badge = "".join(cell["source"]).removeprefix(text.strip())  # Colab's, below the first
        said = translated[name].text.strip() if name in translated else text.strip()
        cell["source"] = (said + badge).replace("](../", "](../../").splitlines(keepends=True)
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def statements(exercise: str) -> dict[str, str]:
    """{name of the symbol: its docstring}."""
    from excerpts import definition

    nodes = {symbol.name: definition(str(symbol)) for symbol in COURSE.exercise(exercise).symbols}
    return {name: f"{ast.get_docstring(node)}\n" for name, node in nodes.items()}  # type: ignore[arg-type]


def _named(parts: Iterator[tuple[str, str]]) -> dict[str, str]:
    """The second of a name gets `_1`, as anchors do."""
    found: dict[str, str] = {}
    for name, text in parts:
        times = sum(re.fullmatch(rf"{re.escape(name)}(_\d+)?", other) is not None for other in found)
        found[f"{name}_{times}" if times else name] = text
    return found
