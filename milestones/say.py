"""How the commands speak: on the terminal, in the reader's language."""

import io
import sys

from rich.console import Console

from milestones.language import t

console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def print_any_character() -> None:
    """Let a character that the output's encoding does not have be printed as `\\u25a1`, and end no command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str, **values: object) -> None:
    """A line in the reader's language, with these values in its braces."""
    console.print(t(text, **values), soft_wrap=True)
