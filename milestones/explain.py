"""The reference with remarks between its lines: each quotes a fragment of the line that it stands under."""

from __future__ import annotations

from collections.abc import Iterator

from rich.syntax import Syntax
from rich.text import Text

from milestones import splice
from milestones.manifest import Course
from milestones.say import console
from milestones.tasks import Exercise

MARGIN = "  │ "  # before each line of a remark
WIDEST = 100  # columns of a remark: longer lines are hard to read


def commented(course: Course, exercise: Exercise) -> Iterator[tuple[str, list[tuple[str, list[tuple[str, str]]]]]]:
    """(place, its body's lines, each with the remarks on it: fragment and text) of the exercise's functions."""
    remarks = course.remarks(exercise)
    for symbol in exercise.symbols:
        function = splice.find(course.source(symbol.path), symbol.name)
        body = function.body_at("").split("\n")
        lines = [(line, [remark for remark in remarks if remark[0] in line]) for line in body]
        yield f"{symbol.path}:{function.line}  {symbol.name}", lines


def print_commented(course: Course, exercise: Exercise) -> None:
    """Print an exercise's functions, each remark under its line."""
    for title, lines in commented(course, exercise):
        console.print(Text(f"{title}\n", style="bold"), soft_wrap=True)
        for line, remarks in lines:
            if console.is_terminal:
                console.print(Syntax(line, "python", background_color="default", word_wrap=True))
            else:
                console.print(Text(line), soft_wrap=True)
            for fragment, text in remarks:
                said = " ".join(text.split())
                _print_remark(said if fragment == line.strip() else f"`{fragment}`: {said}")
        console.print()


def _print_remark(said: str) -> None:
    remark = Text(said)
    remark.highlight_regex(r"`[^`]+`", "cyan")
    remark.highlight_regex(r"\*[^*`]+\*", "italic")
    for line in remark.wrap(console, min(console.width, WIDEST) - len(MARGIN)):
        line.rstrip()
        console.print(Text(MARGIN, style="dim").append_text(line))
    console.print(Text(MARGIN.rstrip(), style="dim"))
