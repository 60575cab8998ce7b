"""Builders: whole components that a learner writes from a protocol and its tests, beside the guided exercises."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from milestones.manifest import PACKAGE, Builder, Course

FOLDER = Path(PACKAGE, "builders")


def put(text: str, builder: Builder, folder: Path) -> Path:
    """Make a `mine/` in `folder` in which the component is `text`; returns the folder."""
    file = folder / builder.path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return folder


def put_references(course: Course, folder: Path) -> Path:
    """A `mine/` with the references of all builders; returns the folder."""
    for builder in course.builders:
        put(builder.reference.read_text("utf-8"), builder, folder)
    return folder


def begin(builder: Builder, folder: Path) -> tuple[Path, bool]:
    """The learner's file, and whether it is new: its docstring says what to build, and the class is empty."""
    file = folder / builder.path
    if file.is_file():
        return file, False
    put(template(builder), builder, folder)
    return file, True


def template(builder: Builder) -> str:
    """A file with the task and the protocol, and nothing that solves it."""
    module, _, name = builder.protocol.partition(":")
    task = builder.statement.replace("\\", "\\\\").replace('"""', "'''")
    imports = f"from {module} import {name}\n\n\n"
    if builder.symbol[0].islower():  # a function, which is asked to have a signature and no base class
        body = f"def {builder.symbol}(*arguments):  # the arguments of {name}.__call__, in their order\n"
        return f'"""{task}\n"""\n\n{imports}{body}    raise NotImplementedError\n'
    return f'"""{task}\n"""\n\n{imports}class {builder.symbol}({name}):\n    """Yours: see the docstrings of {name}."""\n'


def load_file(file: Path, symbol: str) -> Any:
    """What a file defines under this name. ValueError where it does not."""
    name = f"own_{file.parent.parent.parent.name}_{file.stem}".replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton and dataclasses look their own module up
    spec.loader.exec_module(module)
    if not hasattr(module, symbol):
        raise ValueError(f"{file} has no {symbol}: that is the name under which the engine looks for it")
    return getattr(module, symbol)


def scorer(builder: Builder) -> Any:
    """The function that scores a component."""
    module, _, name = builder.scorer.partition(":")
    return getattr(importlib.import_module(module), name)
