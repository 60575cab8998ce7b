"""What the commands print on the terminal, in the reader's language."""

import io
import sys

from rich.console import Console
from rich.markdown import Markdown
from rich.syntax import Syntax
from rich.text import Text

from milestones.language import t

console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
errors = Console(highlight=False, stderr=True)


def print_any_character() -> None:
    """Print a character that the output's encoding lacks as `\\u25a1`; without this it would end the command with an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str, **values: object) -> None:
    """Print a line in the reader's language, with these values in its braces."""
    console.print(t(text, **values), soft_wrap=True)


def print_code(text: str) -> None:
    """Print Python code, in colours on a terminal."""
    code = Syntax(text, "python", background_color="default") if console.is_terminal else Text(text)
    console.print(code, soft_wrap=True)


def print_hints(hints: list[tuple[str, str]], used: int, all: bool) -> int:
    """Print one hint more than were used, or all. Returns how many it printed."""
    shown = len(hints) if all else min(used + 1, len(hints))
    for heading, text in hints[:shown]:
        console.print(Markdown(f"### {heading}\n\n{text}"))
        console.print()
    return shown


def say_what_is_left(hints: list[tuple[str, str]], shown: int, answer: str) -> None:
    """Print how many hints there are, and once all are shown, `answer`: where the solution is."""
    more = t("the same command gives the next") if shown < len(hints) else answer
    say("{shown} of {all} hints; {more}", shown=shown, all=len(hints), more=more)
