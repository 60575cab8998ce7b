"""How the commands speak: on the terminal, in the reader's language."""

import sys

from rich.console import Console

from milestones.language import t

console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def say(text: str, **values: object) -> None:
    """A line in the reader's language, with these values in its braces."""
    console.print(t(text, **values), soft_wrap=True)
