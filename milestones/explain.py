"""The reference with remarks between its lines: each quotes a fragment of the line that it stands under."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from milestones import splice
from milestones.manifest import Course
from milestones.tasks import Exercise, Symbol

MARGIN = "  │ "  # before each line of a remark
WIDEST = 100  # columns of a remark: longer lines are hard to read


@dataclass(frozen=True, slots=True)
class Commented:
    """One function of the reference: each line of its body, and the remarks on it, (fragment, text) each."""

    symbol: Symbol
    line: int  # of `def`, in the reference's file
    lines: list[tuple[str, list[tuple[str, str]]]]


def commented(course: Course, exercise: Exercise) -> Iterator[Commented]:
    """The exercise's functions, in the order of its symbols.

    Raises ValueError unless each fragment stands in their bodies just once, and in the order of the remarks.
    """
    functions = [splice.find(course.source(symbol.path), symbol.name) for symbol in exercise.symbols]
    bodies = [function.body_at("") for function in functions]
    remarks, text, last = course.remarks(exercise), "\n".join(bodies), -1
    for fragment, _ in remarks:
        if (count := text.count(fragment)) != 1:
            raise ValueError(f"a remark on {exercise.id} quotes `{fragment}`, which the reference has {count} times")
        if (place := text.index(fragment)) <= last:
            raise ValueError(f"the remark on `{fragment}` of {exercise.id} stands behind one on what comes later")
        last = place
    for symbol, function, body in zip(exercise.symbols, functions, bodies, strict=True):
        lines = [(line, [remark for remark in remarks if remark[0] in line]) for line in body.split("\n")]
        yield Commented(symbol, function.line, lines)


def print_commented(console: Console, function: Commented) -> None:
    """Print a function, each remark under its line."""
    title = f"{function.symbol.path}:{function.line}  {function.symbol.name}\n"
    console.print(Text(title, style="bold"), soft_wrap=True)
    for line, remarks in function.lines:
        if console.is_terminal:
            console.print(Syntax(line, "python", background_color="default", word_wrap=True))
        else:
            console.print(Text(line), soft_wrap=True)
        for fragment, text in remarks:
            said = " ".join(text.split())
            _print_remark(console, said if fragment == line.strip() else f"`{fragment}`: {said}")
    console.print()


def _print_remark(console: Console, said: str) -> None:
    remark = Text(said)
    remark.highlight_regex(r"`[^`]+`", "cyan")
    remark.highlight_regex(r"\*[^*`]+\*", "italic")
    for line in remark.wrap(console, min(console.width, WIDEST) - len(MARGIN)):
        line.rstrip()
        console.print(Text(MARGIN, style="dim").append_text(line))
    console.print(Text(MARGIN.rstrip(), style="dim"))
