"""Builders: whole components that a learner writes from a protocol and its tests, and `python -m milestones build` and `score`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markdown import Markdown
from rich.table import Table

from milestones.check import FIRST_FAILURE, run_tests
from milestones.language import t
from milestones.manifest import Course
from milestones.mine import Mine
from milestones.mini import cli as mini
from milestones.say import console, say
from milestones.tasks import Builder

app = typer.Typer()


@app.command()
def build(
    id: Annotated[
        str,
        typer.Argument(
            metavar="[ID]", help="A milestone, say m3, or mini: a whole engine; all builders are listed if left out."
        ),
    ] = "",
) -> None:
    """Begin a whole component of your own, beside the exercises: an empty file in mine/folovllm/learn/builders/.

    What you wrote there is never touched. No exercise needs it.
    """
    if id == "mini":
        return mini.build()
    mine = Mine.of(Course.here())
    if not id:
        table = Table("", *map(t, ("builder", "minutes", "your file")), box=None)
        for builder in mine.course.builders:
            begun = (mine.folder / builder.path).is_file()
            table.add_row(builder.id, t(builder.title), str(builder.minutes), str(builder.path) if begun else "-")
        console.print(table)
        return
    builder, state = mine.course.builder(id), mine.state
    file = mine.folder / builder.path
    if is_new := not file.is_file():
        mine.write(builder.path, template(builder, mine.course))
        mine.save(state)  # which names it is written in
        console.print(Markdown(builder.statement))
        console.print()
    said = t("new, yours to write") if is_new else t("there already, left as it is")
    console.print(f"{file}: {said}", soft_wrap=True)
    say("  test    python -m milestones test {id}", id=builder.id)
    say("  stuck   python -m milestones hint {id}", id=builder.id)
    say("  score   python -m milestones score {id}", id=builder.milestone)
    use = f"folovllm generate Hello --milestone {builder.milestone} --builders {builder.name} ..."
    say("  use it  FOLOVLLM_MINE=mine {command}", command=use)


@app.command()
def score(id: Annotated[str, typer.Argument(metavar="ID", help="A milestone, say m3.")]) -> None:
    """Compare your component with the engine's own and with the course's reference, once it passes its tests. Seconds are virtual."""
    os.environ.pop("FOLOVLLM_MINE", None)  # the engine around it is the reference's, so that scores can be compared
    mine = Mine.of(Course.here())
    builder = mine.course.builder(id)
    rows = scores(builder, mine)
    table = Table("", *map(t, rows[0][1]), box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, cells in rows:
        table.add_row(t(label), *cells.values(), style="bold" if label == "yours" else "")
    console.print(table)
    bronze, silver, gold = (f"{value:,}" for value in builder.medals)
    said = "{target} counts: bronze {bronze}, silver {silver}, gold {gold}"
    say(said, target=t(builder.target), bronze=bronze, silver=silver, gold=gold)
    if "yours" not in dict(rows):
        say("Yours is not begun: python -m milestones build {id}", id=builder.milestone)


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
    from folovllm.learn.builders import component

    name = "component_" + "".join(c if c.isalnum() else "_" for c in str(file.with_suffix("")))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton and dataclasses look their own module up
    spec.loader.exec_module(module)
    return component(module, symbol)


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
    components = OURS[builder.name] | {"the course's reference": load_file(builder.reference, builder.symbol)}
    if mine and (file := mine.folder / builder.path).is_file():
        components["yours"] = load_file(file, builder.symbol)
        status, outcomes = run_tests(mine, [*FIRST_FAILURE, "-q", *builder.tests], quiet=True)
        if unwritten := next((id for _, id in outcomes.values() if id), None):
            said = "yours has no score yet, for its tests meet an exercise that is not written: python -m milestones test {id}"
            raise ValueError(t(said, id=unwritten))
        if status:
            said = "yours does not pass its tests, so it has no score: python -m milestones test {id}"
            raise ValueError(t(said, id=builder.id))
    found = {label: score(component) for label, component in components.items()}
    medals = {label: {"medal": t(builder.medal(cells))} for label, cells in found.items()}
    return [(label, {k: shown(v) for k, v in cells.items()} | medals[label]) for label, cells in found.items()]


def shown(value: float) -> str:
    """Whole numbers whole, others with three digits or so."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2}f}"


def score_table(builder: Builder, mine: Mine | None) -> str:
    """The scores as a Markdown table."""
    rows = scores(builder, mine)
    lines = [("", *rows[0][1]), ("---", *("---:" for _ in rows[0][1]))]
    lines += [(label, *cells.values()) for label, cells in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def own_scores(id: str) -> str:
    """What a component of the learner's is worth beside ours, as a Markdown table: for a notebook."""
    course = Course.here()
    return score_table(course.builder(id), Mine.of(course))
