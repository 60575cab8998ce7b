"""The reference with remarks between its lines. Each remark quotes a fragment of the line that it belongs to."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text

from milestones import splice
from milestones.manifest import Course, Exercise, Symbol

MARGIN = 4  # columns by which a remark is indented
WIDEST = 100  # columns: longer lines of prose are hard to read


@dataclass(frozen=True, slots=True)
class Commented:
    """One function of the reference: each line of its body with the remarks on it, (fragment, text) each."""

    symbol: Symbol
    line: int  # of `def`, in the reference's file
    lines: list[tuple[str, list[tuple[str, str]]]]


def commented(course: Course, exercise: Exercise) -> Iterator[Commented]:
    """The exercise's functions, in the order of its symbols. ValueError unless each fragment stands there just once."""
    remarks = course.remarks(exercise)
    functions = [splice.find(course.source(symbol.path), symbol.name) for symbol in exercise.symbols]
    bodies = [function.body_at("") for function in functions]
    for fragment, _ in remarks:
        if (count := "\n".join(bodies).count(fragment)) != 1:
            raise ValueError(f"{exercise.id}: a remark is on `{fragment}`, which the reference has {count} times")
    for symbol, function, body in zip(exercise.symbols, functions, bodies, strict=True):
        lines = [(line, [(f, text) for f, text in remarks if f in line]) for line in body.split("\n")]
        yield Commented(symbol, function.line, lines)


def print_commented(console: Console, function: Commented) -> None:
    """Print a function, each remark under its line."""
    console.print(Text(f"{function.symbol.path}:{function.line}  {function.symbol.name}\n", style="bold"), soft_wrap=True)
    for line, remarks in function.lines:
        if console.is_terminal:
            console.print(Syntax(line, "python", background_color="default", word_wrap=True))
        else:
            console.print(Text(line), soft_wrap=True)
        for fragment, text in remarks:
            whole = text if fragment == line.strip() else f"`{fragment}`: {text}"
            console.print(Padding(Markdown(whole), (0, 0, 1, MARGIN)), width=min(console.width, WIDEST))
    console.print()
