"""Command-line flags made from dataclasses, so that a new field is a new flag, with the same words of help."""

from __future__ import annotations

import inspect
import os
import re
import tempfile
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

Given = dict[str, Any]  # by field name; None or an empty list where a flag was not given


def with_flags(command: Callable[..., None], *kinds: type) -> Callable[..., None]:
    """Give `command(..., **given)` a flag for each field of the dataclasses.

    A name that two of them share (`seed`) is one flag, described as in the first, and set in both.
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = {p.name: p.replace(kind=p.KEYWORD_ONLY) for p in own if p.kind is not p.VAR_KEYWORD}
    for kind in kinds:
        for parameter in _parameters(kind):
            parameters.setdefault(parameter.name, parameter)
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return command


def pick(given: Given, kind: type) -> Given:
    """Those of the flags that were given and that are fields of `kind`: its keyword arguments.

    Raises:
        ValueError: a flag has an empty text.
    """
    names = [field.name for part in parts_of(kind) for field in fields(part)]
    chosen = {name: given[name] for name in names if given.get(name) not in (None, [])}
    if empty := [name for name, value in chosen.items() if value == ""]:
        raise ValueError(f"--{empty[0].replace('_', '-')} is empty: give it a value, or leave it out")
    return chosen


def engine_flags(given: Given) -> Given:
    """Those of the flags that describe the engine. A bad value is refused before torch is loaded."""
    from folovllm.config import EngineConfig
    from folovllm.learn.overlay import started_milestone

    chosen = pick(given, EngineConfig)
    if started := started_milestone():
        chosen.setdefault("milestone", started)
    EngineConfig(**chosen)
    return chosen


def parts_of(kind: type) -> list[type]:
    """The dataclasses whose fields are keywords of `kind`: itself, and of `EngineConfig` the options of the electives, too."""
    return [kind, *getattr(kind, "options", list)()]


def described_fields(kind: type) -> list[tuple[Field[Any], str]]:
    """Each field that can be a flag, with its sentence in the "Attributes" section of the docstring."""
    found = []
    for part in parts_of(kind):
        section = (inspect.getdoc(part) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, re.MULTILINE)
        sentences = {name: " ".join(text.split()) for name, text in entries}
        found += [(field, sentences.get(field.name, "")) for field in fields(part) if field.metadata.get("flag", True)]
    return found


def flag_name(field: Field[Any]) -> str:
    """`max_model_len` -> `--max-model-len`."""
    return "--" + field.name.replace("_", "-")


def default_of(field: Field[Any]) -> Any:
    """The value of a field that is not given; None for an empty list."""
    return None if field.default is MISSING else field.default


def _parameters(kind: type) -> Iterator[inspect.Parameter]:
    hints = {name: hint for part in parts_of(kind) for name, hint in typing.get_type_hints(part).items()}
    for field, text in described_fields(kind):
        default = default_of(field)
        hint: Any = field.metadata.get("flag_type", hints[field.name])
        shown = "" if default is None or isinstance(default, bool) else f" (default: {default})"
        can_be_off = default is True or (default is None and bool in typing.get_args(hint))  # None: the preset decides
        name = flag_name(field)
        names = f"{name}/--no-{name[2:]}" if can_be_off else name
        option = typer.Option(names, help=text + shown, rich_help_panel=kind.__name__, show_default=False)
        annotation = Annotated[hint | None, option]
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def writable(context: typer.Context, file: Path | None) -> Path | None:
    """Check, before any work, that `file` can be written afterwards, and is the command's only output there. Raises typer.BadParameter."""
    if file is None:
        return None
    if not os.path.isdir(file.parent):  # `Path.is_dir` raises for a name that is too long
        raise typer.BadParameter(f"there is no folder {file.parent}")
    try:
        if file.is_file() or file.is_dir():
            file.open("ab").close()
        if file.is_file() or not file.exists():  # it is replaced by a file that is written beside it
            tempfile.TemporaryFile(dir=file.resolve().parent).close()
            outputs: list[Path] = context.meta.setdefault("folovllm.outputs", [])
            if file.resolve() in outputs:
                raise typer.BadParameter(f"{file} is the file of another flag, too: name two files")
            outputs.append(file.resolve())
    except OSError as error:
        raise typer.BadParameter(f"nothing can be written to {file}: {error.strerror}") from error
    return file
