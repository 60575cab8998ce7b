"""Builders: whole components that a learner writes from a protocol and its tests, beside the guided exercises."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from milestones.check import FIRST_FAILURE, run_tests
from milestones.language import t
from milestones.manifest import Course
from milestones.mine import Mine
from milestones.tasks import PACKAGE, Builder

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


def put_wrong(builder: Builder, wrong: str, course: Course, folder: Path) -> Path:
    """A `mine/` with a wrong component, by name, or without one with what `begin` writes; returns the folder.

    A wrong one may build on `folovllm.builders.reference`.
    """
    text = (builder.folder / f"wrong/{wrong}.py").read_text("utf-8") if wrong else template(builder, course)
    put(text, builder, folder)
    (folder / FOLDER / "reference.py").write_text(builder.reference.read_text("utf-8"), encoding="utf-8")
    return folder


def begin(builder: Builder, course: Course, folder: Path) -> tuple[Path, bool]:
    """The learner's file, and whether it is new: its docstring says what to build, and the class is empty."""
    file = folder / builder.path
    if file.is_file():
        return file, False
    put(template(builder, course), builder, folder)
    return file, True


def template(builder: Builder, course: Course) -> str:
    """A file with the task and the protocol, and nothing that solves it."""
    module, _, name = builder.protocol.partition(":")
    is_base = f"class {name}(ABC):" in course.source(Path(*module.split(".")).with_suffix(".py"))
    task = builder.statement.replace("\\", "\\\\").replace('"""', "'''")
    head = f'"""{task}\n"""\n\n'
    if builder.symbol[0].islower():
        arguments = f"*arguments):  # those of {name}.__call__, in their order: give them names"
        return f"{head}def {builder.symbol}({arguments}\n    raise NotImplementedError\n"
    if not is_base:
        return f'{head}class {builder.symbol}:\n    """Yours; it has what {module}.{name} has."""\n'
    return f'{head}from {module} import {name}\n\n\nclass {builder.symbol}({name}):\n    """Yours: see {name}."""\n'


def load_file(file: Path, symbol: str) -> Any:
    """What a file defines under this name. ValueError where it does not, or not all of it."""
    name = "component_" + "".join(c if c.isalnum() else "_" for c in str(file.with_suffix("")))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton and dataclasses look their own module up
    spec.loader.exec_module(module)
    if not hasattr(module, symbol):
        raise ValueError(f"{file} has no {symbol}: that is the name under which the engine looks for it")
    found = getattr(module, symbol)
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ValueError(f"{symbol} in {file} is not complete, it lacks: {', '.join(missing)}")
    return found


def scorer(builder: Builder) -> Any:
    """The function that scores a component."""
    module, _, name = builder.scorer.partition(":")
    return getattr(importlib.import_module(module), name)


def scores(builder: Builder, mine: Mine | None = None) -> list[tuple[str, dict[str, str]]]:
    """(whose, numbers as text by their column, the medal) of the engine's own, the reference and, if begun, the learner's.

    Raises:
        ValueError: the learner's does not pass its tests, or a scorer found that it computes something else.
    """
    from milestones.scores import OURS

    score = scorer(builder)
    components = {label: make() for label, make in OURS[builder.name].items()}
    components["the course's reference"] = load_file(builder.reference, builder.symbol)
    if mine and (file := mine.folder / builder.path).is_file():
        components["yours"] = load_file(file, builder.symbol)
        if run_tests(mine, [*FIRST_FAILURE, "-q", *builder.tests], quiet=True)[0]:
            said = "yours does not pass its tests, so it has no score: python -m milestones test {id}"
            raise ValueError(t(said, id=builder.id))
    found = {label: score(component) for label, component in components.items()}
    return [
        (w, {**{k: shown(v) for k, v in cells.items()}, "medal": t(builder.medal(cells))}) for w, cells in found.items()
    ]


def shown(value: float) -> str:
    """Whole numbers whole, others with three digits or so."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2}f}"


def score_table(builder: Builder, mine: Mine | None) -> str:
    """The scores as a Markdown table."""
    rows = scores(builder, mine)
    lines = [
        ("", *rows[0][1]),
        ("---", *("---:" for _ in rows[0][1])),
        *((label, *cells.values()) for label, cells in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def own_scores(id: str) -> str:
    """What a component of the learner's is worth beside ours, as a Markdown table: for a notebook."""
    course = Course.here()
    return score_table(course.builder(id), Mine.of(course))
