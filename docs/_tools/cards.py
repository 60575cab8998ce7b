"""What a page becomes on a small screen and for a hand: wide tables as cards, exercises as cards, and the map's rows with their sources."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mkdocs.utils import get_relative_url
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from milestones.manifest import Course
from milestones.tasks import EXERCISE_ID

ROOT = Path(__file__).resolve().parents[2]
COURSE = Course(ROOT)
SOURCES = "assets/source"
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
FIRST_CELL = re.compile(r"<td[^>]*>(.*?)</td>", re.DOTALL)
CELL = re.compile(r"<td([^>]*)>")
EXERCISE = re.compile(rf"<blockquote>(\s*<p><strong>(?:Exercise|练习) ({EXERCISE_ID})\b.*?)</blockquote>", re.DOTALL)
MAP_ROW = re.compile(
    r"(<td[^>]*><code>([\w.]+)</code></td>\s*<td[^>]*>[^\n]*</td>\s*<td[^>]*>)<code>([\w/]+\.py)</code>"
)
LONG = 60  # letters of a row that a phone cannot show beside others
WORDS = {"en": ("about {} minutes", "test", "hint"), "zh": ("约 {} 分钟", "测试", "提示")}
sources: set[str] = set()  # files that the map names, in this build


def table_cards(content: str) -> str:
    """Tables of many columns, or of long rows, say in each cell what its column is called: a phone stacks the cells.

    The first cell heads a card, and says so only where the column is of numbers: "16" alone tells nobody that it counts requests.
    """

    def table(match: re.Match[str]) -> str:
        head, *rows = re.split(r"(?=<tr\b)", match[0])[1:]
        names = [re.sub(r"<[^>]+>", "", name) for name in re.findall(r"<th[^>]*>(.*?)</th>", head, re.DOTALL)]
        longest = max((len(re.sub(r"<[^>]+>", "", row)) for row in rows), default=0)
        if len(names) < 3 or (len(names) < 4 and longest < LONG):
            return match[0]

        firsts = (re.sub(r"<[^>]+>", "", cell[1]) for row in rows if (cell := FIRST_CELL.search(row)))
        first = "" if any(re.search(r"[^\W\d_]", text) for text in firsts) else names[0]

        def named(row: str) -> str:
            left = iter([first, *names[1:]])
            return CELL.sub(lambda cell: f'<td{cell[1]} data-label="{next(left, "")}">', row)

        above = re.split(r"<tr\b", match[0], maxsplit=1)[0]
        return f'<div class="cards">{above}{head}{"".join(map(named, rows))}</div>'

    return TABLE.sub(table, content)


def exercise_cards(content: str, language: str) -> str:
    """Below an exercise's task: how long it takes by its share of the milestone's minutes, its tests, and its hints."""

    def card(match: re.Match[str]) -> str:
        exercise, (about, test, hint) = match[2], WORDS[language]
        commands = (
            f"<span>{word} <code>python -m milestones {word_} {exercise}</code></span>"
            for word, word_ in ((test, "test"), (hint, "hint"))
        )
        minutes = f"<span>{about.format(_minutes(exercise))}</span>"
        return f'<div class="exercise">{match[1]}<p class="exercise-foot">{minutes}{"".join(commands)}</p></div>'

    return EXERCISE.sub(card, content)


def _minutes(exercise: str) -> int:
    """An exercise's share, by difficulty, of the minutes that its milestone's exercises take; to five minutes."""
    milestone = next(m for m in COURSE.milestones if m.id == exercise.partition(".")[0])
    difficulty = {e.id: e.difficulty for e in milestone.exercises}
    return max(5, round(milestone.minutes * difficulty[exercise] / sum(difficulty.values()) / 5) * 5)


def map_rows(content: str, url: str) -> str:
    """The files of the map's tables lead to their source, at the line of the row's function."""

    def row(match: re.Match[str]) -> str:
        above, name, file = match.groups()
        sources.add(file)
        line = _line_of(ROOT / "folovllm" / file, name)
        return f'{above}<a href="{get_relative_url(f"{SOURCES}/{file}.html", url)}#L-{line}"><code>{file}</code></a>'

    return MAP_ROW.sub(row, content)


def _line_of(file: Path, name: str) -> int:
    """The line at which a function or method begins; 1 for what is none."""
    nodes, found = ast.parse(file.read_text("utf-8")).body, 1
    for part in name.split("."):
        node = next((n for n in nodes if getattr(n, "name", None) == part), None)
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            return found
        nodes, found = node.body, node.lineno
    return found


def write_sources(site: Path) -> None:
    """A page for each file that the map names."""
    for file in sorted(sources):
        page = HtmlFormatter(full=True, title=f"folovllm/{file}", linenos="inline", lineanchors="L", wrapcode=True)
        target = site / SOURCES / f"{file}.html"
        target.parent.mkdir(parents=True, exist_ok=True)
        shown = highlight((ROOT / "folovllm" / file).read_text("utf-8"), PythonLexer(), page)
        target.write_text(shown.replace("</title>", '</title>\n<link rel="icon" href="data:,">', 1), "utf-8")
