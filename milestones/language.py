"""The language in which `python -m milestones` speaks: English, or Chinese by `FOLOVLLM_LANG=zh` or the system's locale.

What it says stands in English in the code, and `messages.zh.toml` has the Chinese of each sentence. A text in a file of its own, as hints are,
has its translation beside it: `m2.1.zh.md`.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

MARK = re.compile(r"^<!-- source: \S+.*?-->\n", re.M)  # see docs/_tools/editions.py


def language() -> str:
    """ "zh" or "en": what `FOLOVLLM_LANG` says, else the first that the system's locale does."""
    said = next(filter(None, map(os.environ.get, ("FOLOVLLM_LANG", "LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return "zh" if said.lower().startswith("zh") else "en"


@cache
def messages(language: str) -> dict[str, str]:
    """{English: translated}; empty for English itself."""
    file = Path(__file__).with_name(f"messages.{language}.toml")
    found: dict[str, str] = tomllib.loads(file.read_text("utf-8")) if file.is_file() else {}
    return found


def t(text: str, **values: object) -> str:
    """A sentence in the reader's language, with these values in its braces. English where there is no translation."""
    said = messages(language()).get(text, text)
    return said.format(**values) if values else said


def translated(file: Path) -> Path:
    """The translation beside a file, where there is one; else the file itself."""
    other = file.with_name(f"{file.stem}.{language()}{file.suffix}")
    return other if other.is_file() else file


def read_text(file: Path) -> str:
    """A file's text in the reader's language."""
    return MARK.sub("", translated(file).read_text("utf-8"))


def read_sections(file: Path) -> list[tuple[str, str]]:
    """(heading, text) of each part of a file in the reader's language; a part begins with a level-two heading."""
    parts = re.split(r"^## +", read_text(file), flags=re.M)[1:]
    return [(heading.strip(), text.strip()) for heading, _, text in (part.partition("\n") for part in parts)]


def parts_of(command: Any) -> Iterator[Any]:
    """A command and all below it."""
    yield command
    for part in getattr(command, "commands", {}).values():
        yield from parts_of(part)


def in_language(app: Any) -> Callable[[], None]:
    """A typer application whose help is in the reader's language."""
    from typer import main, rich_utils

    command: Any = main.get_command(app)
    for part in parts_of(command):
        for described in (part, *part.params):
            described.help = t(described.help) if described.help else described.help
    for title in ("ARGUMENTS_PANEL_TITLE", "OPTIONS_PANEL_TITLE", "COMMANDS_PANEL_TITLE", "ERRORS_PANEL_TITLE"):
        setattr(rich_utils, title, t(getattr(rich_utils, title)))
    return command
